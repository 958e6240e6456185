"""The file that `batchgen init` writes: each of its lines, uncommented, sets its option; as it is, it sets nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from batchgen.cli.app import run_command
from batchgen.config.example_file import example_text
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import OPTIONS, RunConfig
from batchgen.errors import UsageError

LINES = re.findall(r"^#(\w+ = .*)$", example_text(), re.M)
NEEDED = {"custom_logit_processor": {"logit_processor": ("calm=m:f",)}, "lora_path": {"lora": ("fr=a",)}}
NEEDED["custom_params"] = NEEDED["custom_logit_processor"] | {"custom_logit_processor": "calm"}
"""Option -> flags without which its example is refused."""


def resolved(folder: Path, flags: dict[str, object] | None = None) -> RunConfig:
    return resolve_config({"inputs": ("p.jsonl",), **(flags or {})}, {}, folder)


def test_every_option_has_a_line() -> None:
    names = [line.partition(" =")[0] for line in LINES]
    assert sorted(names) == sorted(o.name for o in OPTIONS if o.target != "meta")
    comments = [line for line in example_text().splitlines() if line]
    assert all(line.startswith("#") for line in comments)
    assert max(map(len, (line for line in comments if line.startswith("# ")))) <= 110
    assert "Example:" not in example_text()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(" =")[0])
def test_a_line_sets_its_option(line: str, tmp_path: Path) -> None:
    """Where the file has to be named for it, it says so."""
    name = line.partition(" =")[0]
    (tmp_path / "batchgen.toml").write_text(line + "\n")
    if file := re.search(r'"@([\w.]+)"', line):
        (tmp_path / file[1]).write_text("{}" if name != "ebnf" else 'root ::= "a"')
    flags = {**NEEDED.get(name, {}), **({"events": "-"} if name == "stream" else {})}
    config = resolved(tmp_path, {**flags, "config": "batchgen.toml"})
    assert config.origins[name] == "batchgen.toml"
    described = config.describe()["options"][name]["value"]
    if not line.endswith("# example"):
        assert described == resolved(tmp_path / "..").describe()["options"][name]["value"]
    needs_name = example_text().index(f"\n#{line}") > example_text().index("--config batchgen.toml")
    if needs_name:
        with pytest.raises(UsageError, match=r"--config batchgen\.toml"):
            resolved(tmp_path, flags)
    else:
        assert resolved(tmp_path, flags).origins[name] == "./batchgen.toml"


def test_the_file_as_it_is_sets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init"]) == 0
    assert "batchgen.toml" in capsys.readouterr().out
    text = Path("batchgen.toml").read_text()
    assert text == example_text()
    assert tomllib.loads(text) == {}
    assert resolved(tmp_path).origins == {}


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_there_is_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there = Path("batchgen.toml")
    if kind == "file":
        there.write_text("seed = 7\n")
    elif kind == "link":
        there.symlink_to("gone")
    else:
        there.mkdir()
    assert run_command(["init"]) == 2
    assert capsys.readouterr().err == ("error: batchgen.toml exists and is kept; edit it, or run in another folder\n")
    assert [path.name for path in tmp_path.iterdir()] == ["batchgen.toml"]
    assert kind != "file" or there.read_text() == "seed = 7\n"
