"""Ids of the Hugging Face hub: each reason why a model is not available has its own message and remedy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from batchgen.errors import ModelError
from batchgen.models.check import check_model
from batchgen.models.checkpoint.model_files import TOKENIZER_FILES, resolve_model
from tests.models.tiny import save_tiny

NAME, COMMIT = "some/model", "a" * 40
Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers and content of an answer."""


def refusal(status: int, code: str = "") -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": "no"} if code else {}, b"{}"


@contextmanager
def hub(answers: Mapping[str, Answer]) -> Iterator[str]:
    """A hub that answers each path by the longest beginning of it among `answers`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = max((key for key in answers if self.path.startswith(key)), key=len)
            status, headers, content = answers[found]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache. The library reads its settings when it is imported, so they are set as attributes."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def message(monkeypatch: pytest.MonkeyPatch, endpoint: str, revision: str | None = None) -> str:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    urls = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    with pytest.raises(ModelError) as caught:
        resolve_model(NAME, revision)
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


REFUSALS: dict[str, tuple[Answer, list[str]]] = {
    "no such model": (refusal(404, "RepoNotFound"), ["no hub model of that name", "Check the name"]),
    "no such model, or private": (refusal(401, "RepoNotFound"), ["no hub model of that name", "hf auth login"]),
    "gated": (refusal(403, "GatedRepo"), ["is gated", "Accept its terms", "hf auth login"]),
    "no such revision": (refusal(404, "RevisionNotFound"), ["has no revision v9", "--revision"]),
    "token refused": (refusal(401), ["refuses access", "401", "hf auth login"]),
    "hub out of order": (refusal(500), ["has no answer", "500", "Try again later"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_answer_of_the_hub_has_its_message(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answer, words = REFUSALS[name]
    with hub({"/": answer}) as endpoint:
        found = message(monkeypatch, endpoint, "v9")
    assert all(word in found for word in words), found
    assert "cannot be reached" not in found


def test_a_hub_that_cannot_be_reached_is_not_a_missing_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = message(monkeypatch, "http://127.0.0.1:9")
    assert "cannot be reached" in found
    assert "HF_ENDPOINT" in found
    assert "no hub model" not in found


def test_a_gated_model_is_named_when_its_files_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of a gated model is public, its files are not."""
    about = json.dumps({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}).encode()
    tree = json.dumps([{"type": "file", "path": "config.json", "size": 2, "oid": "b" * 40}]).encode()
    answers = {
        "/": refusal(403, "GatedRepo"),
        "/api/models/some/model": (200, {"Content-Type": "application/json"}, about),
        f"/api/models/some/model/tree/{COMMIT}": (200, {"Content-Type": "application/json"}, tree),
    }
    with hub(answers) as endpoint:
        assert "is gated" in message(monkeypatch, endpoint)


def fill(cache: Path, folder: Path, names: list[str]) -> Path:
    """Put files of a model into the local cache, as a download does."""
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_bytes((folder / name).read_bytes())
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")


def test_a_complete_cache_needs_no_hub(cache: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(cache, whole, ["config.json", "model.safetensors"])
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert check_model(NAME).folder.path == snapshot


@pytest.mark.parametrize("kind", ["no weights", "no config", "a shard missing"])
def test_an_incomplete_cache_is_named(
    cache: Path, whole: Path, sharded: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = sharded if kind == "a shard missing" else whole
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    lacks = {"no weights": "model.safetensors", "no config": "config.json"}.get(kind, shards[-1])
    fill(cache, folder, [file.name for file in folder.iterdir() if file.name != lacks])
    found = message(monkeypatch, "http://127.0.0.1:9")
    assert "cannot be reached" in found
    assert f"only a part of the model: it lacks {lacks}" in found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = message(monkeypatch, "http://127.0.0.1:9")
    assert f"only a part of {NAME}: it lacks {lacks}" in found
    assert "HF_HUB_OFFLINE" in found
    assert f"hf download {NAME}" in found


def test_offline_without_the_model(cache: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not in the local cache" in message(monkeypatch, "http://127.0.0.1:9")
    fill(cache, whole, ["config.json", "model.safetensors"])
    found = message(monkeypatch, "http://127.0.0.1:9", "v9")
    assert f"revision v9 of {NAME} is not in the local cache" in found
    assert "--revision v9" in found


def test_a_tokenizer_needs_no_weights(cache: Path, whole: Path) -> None:
    snapshot = fill(cache, whole, ["config.json"])
    assert resolve_model(NAME, files=TOKENIZER_FILES) == snapshot
