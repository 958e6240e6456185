"""Names of the run's model in rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.errors import ErrorCode, RowError
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.values import RowDefaults
from tests.rows import CHAT, line, parse, text

SNAPSHOT = "/home/me/.cache/huggingface/hub/models--acme--Tiny-Instruct/snapshots/0123abc"
SAME = ["acme/Tiny-Instruct", "Tiny-Instruct", "mm/Tiny-Instruct", "./mm/Tiny-Instruct", "mm/Tiny-Instruct/", "*", ""]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mm" / "Tiny-Instruct").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mm")


@pytest.mark.field("model")
@pytest.mark.parametrize(
    "model",
    ["mm/Tiny-Instruct", "./mm/Tiny-Instruct/", "acme/Tiny-Instruct", "Tiny-Instruct", "/a/Tiny-Instruct", SNAPSHOT],
)
def test_names_are_equal_by_their_last_component(model: str) -> None:
    run = RowDefaults(names=ModelNames.of(model), adapters=frozenset({"fr"}))
    for name in SAME:
        assert parse(line(CHAT, model=name), run).params.lora_path is None
        if name:
            assert parse(line(CHAT, model=f"{name}:fr"), run).params.lora_path == "fr"
    for name in ("tiny-instruct", "Tiny-Instruct-2", "gpt-4o-mini", "Tiny-Instruct/", "acme"):
        if name.rstrip("/") == "Tiny-Instruct":
            parse(text(model=name), run)
            continue
        with pytest.raises(RowError) as caught:
            parse(text(model=name), run)
        assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.INVALID_FIELD, "model")


def test_spellings_of_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("Tiny-Instruct")
    for model in (".", "../Tiny-Instruct", str(Path.cwd())):
        run = RowDefaults(names=ModelNames.of(model))
        for name in (".", "./", "Tiny-Instruct", "../Tiny-Instruct", str(Path.cwd())):
            assert parse(text(model=name), run).prompts


@pytest.mark.parametrize("name", ["gpt-4o-mini", "accounts/fireworks/models/llama-v3", "qwen3:0.6b", "a name"])
def test_served_names(name: str) -> None:
    run = RowDefaults(names=ModelNames.of("m", ["other", name]), adapters=frozenset({"fr"}))
    for accepted in (name, "other", "m"):
        assert parse(text(model=accepted), run).params.lora_path is None
        assert parse(text(model=f"{accepted}:fr"), run).params.lora_path == "fr"
    with pytest.raises(RowError, match="--lora"):
        parse(text(model=f"{name}:de"), run)


def test_any_model() -> None:
    run = RowDefaults(names=ModelNames.of("m", accept_all=True), adapters=frozenset({"fr"}))
    for name in ("gpt-4o-mini", "ft:gpt-4o-mini:acme::abc", "a:", "\0"):
        assert parse(text(model=name), run).params.lora_path is None
    assert parse(text(model="gpt-4o-mini:fr"), run).params.lora_path == "fr"
    with pytest.raises(RowError, match="--lora"):
        parse(text(model="m:de"), run)


def test_a_name_of_many_colons_is_refused_at_once() -> None:
    with pytest.raises(RowError, match="--served-model-name NAME"):
        parse(text(model=":" * 10_000_000), RowDefaults(names=ModelNames.of("m")))


@pytest.mark.parametrize(
    ("name", "shown"), [("gpt-4o-mini", "gpt-4o-mini"), ("a b", "'a b'"), ("x" * 500, "NAME"), ("a\nb", "NAME")]
)
def test_the_error_says_how_to_go_on(name: str, shown: str) -> None:
    run = RowDefaults(names=ModelNames.of("m"), adapters=frozenset({"fr"}))
    with pytest.raises(RowError) as caught:
        parse(text(model=name), run)
    assert f"--served-model-name {shown}, or every name with --any-model" in caught.value.info.message
    assert len(caught.value.info.message) < 400
    with pytest.raises(RowError, match=r"`model` is 'fr', an adapter; name it as '\*:fr'"):
        parse(text(model="fr"), run)
