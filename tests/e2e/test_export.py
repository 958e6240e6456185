"""`batchgen export` of a run with every kind of row, read with the `openai` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from batchgen.demo import model_path
from tests.e2e.rows import mixed_lines, rows_of, write_lines
from tests.e2e.runner import run

ROWS = 30
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(name: str, url: str, **body: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Zażółć 東京"}]} if url == CHAT else {}
    given = {"model": "*", **({"prompt": "Zażółć 東京"} if url == COMPLETIONS else {}), **prompt, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": given}


def openai_lines() -> list[bytes | dict[str, Any]]:
    """Rows of both endpoints, the mixed rows of this suite, and requests that fail."""
    hot = {"temperature": 1.3, "max_tokens": 12}
    return [
        *mixed_lines(ROWS, seed=5),
        line("text", COMPLETIONS, **hot),
        line("text logprobs", COMPLETIONS, **hot, logprobs=2, n=3),
        line("several", COMPLETIONS, **hot | {"prompt": ["The quick", "naïve café"]}, n=2, logprobs=1),
        line("echo", COMPLETIONS, **hot, echo=True),
        line("echo logprobs", COMPLETIONS, **hot, echo=True, logprobs=2, n=2),
        line("echo of ids", COMPLETIONS, **hot | {"prompt": [40, 300, 41, 7]}, echo=True, logprobs=0),
        line("best", COMPLETIONS, **hot, best_of=4, n=2, logprobs=1),
        line("chat", CHAT, **hot),
        line("chat logprobs", CHAT, **hot, logprobs=True, top_logprobs=3, n=2),
        line("stopped", CHAT, **hot, stop=["e", "a", " "]),
        line("wrong", CHAT, temperature=3),
        line("long", COMPLETIONS, prompt="The quick brown fox " * 200),
        {**line("unknown", CHAT), "url": "/v1/embeddings"},
        {"id": "scored", "text": "The quick", "completions": [" brown", " fox"]},
        {"id": "embedded", "input_embeds": [[0.1] * 64] * 3, "max_new_tokens": 4, "return_logprob": True},
        {"id": "states", "text": "The quick", "return_hidden_states": True, "max_new_tokens": 4},
        {"id": "native chat", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 5},
    ]


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl, out.parquet and the exported OpenAI batch files."""
    folder = tmp_path_factory.mktemp("export")
    write_lines(folder / "in.jsonl", openai_lines())
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32"], folder)
    result = run(["export", "out.parquet", "--format", "openai-batch"], folder)
    assert "out.openai.jsonl, out.openai.errors.jsonl" in result.stderr
    return folder


def lines_of(path: Path) -> dict[str, Any]:
    """custom_id -> line of a JSONL file."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def parsed(each: Any) -> Completion | ChatCompletion:
    """A line's body as a type of the `openai` package, validated strictly."""
    assert (each["response"]["status_code"], each["error"]) == (200, None)
    body = each["response"]["body"]
    kind = ChatCompletion if body["object"] == "chat.completion" else Completion
    return kind.model_validate(body, strict=True)


def test_every_body_validates_and_equals_its_rows(done: Path) -> None:
    output, errors = lines_of(done / "out.openai.jsonl"), lines_of(done / "out.openai.errors.jsonl")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(done / "out.parquet"):
        rows.setdefault(row["id"], []).append(row)
    assert rows.keys() == output.keys() | errors.keys()
    assert {name for name, (first, *_) in rows.items() if first["status"] == "error"} == set(errors)
    assert {"wrong", "long", "unknown"} <= set(errors)
    for name, each in output.items():
        found = parsed(each)
        if name in ("text", "text logprobs", "several", "chat", "chat logprobs", "stopped", "native chat"):
            assert isinstance(found, ChatCompletion) == (name in ("stopped", "native chat") or name.startswith("chat"))
        assert [choice.index for choice in found.choices] == list(range(len(rows[name])))
        for choice, row in zip(found.choices, rows[name], strict=True):
            text = choice.text if isinstance(found, Completion) else choice.message.content  # type: ignore[union-attr]
            assert text == (row["text"] or "")
            assert choice.finish_reason == row["finish_reason"]
            assert (choice.logprobs is None) == (row["output_logprobs"] is None)
        assert found.usage is not None
        dropped = rows[name][0]["dropped_tokens"] or 0
        assert found.usage.completion_tokens == dropped + sum(row["completion_tokens"] for row in rows[name])
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.field("echo", "best_of", "logprobs", "top_logprobs")
def test_logprobs_with_the_tokenizer_of_the_run(done: Path) -> None:
    """Each token is at its `text_offset` of the text, echoed ones before the output's."""
    output = lines_of(done / "out.openai.jsonl")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(done / "out.parquet"):
        rows.setdefault(row["id"], []).append(row)
    for name in ("text logprobs", "echo logprobs", "echo of ids"):
        found = parsed(output[name])
        assert isinstance(found, Completion)
        for choice, row in zip(found.choices, rows[name], strict=True):
            logprobs = choice.logprobs
            assert logprobs is not None
            echoed = [] if row["input_logprobs"] is None else [0.0, *row["input_logprobs"][1:]]
            assert logprobs.token_logprobs == [*echoed, *row["output_logprobs"]]
            assert (logprobs.top_logprobs is None) == (name == "echo of ids")
            for token, at in zip(logprobs.tokens or (), logprobs.text_offset or (), strict=True):
                special = token in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
                assert special or token.startswith("bytes:") or choice.text.startswith(token, at)
    chat = parsed(output["chat logprobs"])
    assert isinstance(chat, ChatCompletion)
    for reply, row in zip(chat.choices, rows["chat logprobs"], strict=True):
        content = reply.logprobs and reply.logprobs.content
        assert content
        assert [token.logprob for token in content] == row["output_logprobs"]
        assert [top.logprob for token in content for top in token.top_logprobs] == row["output_top_logprobs"]
        joined = b"".join(bytes(token.bytes or ()) for token in content).decode("utf-8", "replace")
        assert joined.startswith(row["text"].rstrip("\ufffd"))


def test_files_are_not_overwritten_without_the_option(done: Path) -> None:
    command = ["export", "out.parquet", "--format", "openai-batch"]
    before = (done / "out.openai.jsonl").read_bytes()
    refused = run(command, done, expect=5)
    assert "--overwrite" in refused.stderr
    run([*command, "-o", "again.jsonl"], done)
    assert sorted(path.name for path in done.glob("again*")) == ["again.errors.jsonl", "again.jsonl"]
    assert (done / "again.jsonl").read_bytes() == before, "exports of one output are equal"
    run([*command, "-o", "again.jsonl"], done, expect=5)
    run([*command, "-o", "again.jsonl", "--overwrite"], done)
    refused = run([*command, "-o", "/dev/null", "--overwrite"], done, expect=5)
    assert "/dev/null is not a regular file" in refused.stderr
    assert (done / "again.jsonl").read_bytes() == before
    assert not list(done.glob("*.tmp"))
    lines = [json.loads(text) for text in run([*command, "-o", "-"], done).stdout.splitlines()]
    both = lines_of(done / "out.openai.jsonl") | lines_of(done / "out.openai.errors.jsonl")
    assert lines == [both[name] for name in dict.fromkeys(row["id"] for row in rows_of(done / "out.parquet"))]


def test_results_and_inputs_are_never_overwritten(model: Path, tmp_path: Path) -> None:
    """The default OUT.jsonl may be the run's input, also under another name or a moved copy of it."""
    write_lines(tmp_path / "a.jsonl", [{"text": "The quick", "max_new_tokens": 2}])
    write_lines(tmp_path / "b.errors.jsonl", [{"text": "The slow", "max_new_tokens": 2}])
    run(["run", "a.jsonl", "b.errors.jsonl", "-o", "a.parquet", "--model", model, "--dtype", "float32"], tmp_path)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    export = ["export", "a.parquet", "--overwrite", "--format"]
    for arguments, name in (
        (["jsonl"], "a.jsonl is an input of the run"),
        (["jsonl", "-o", "link.jsonl"], "link.jsonl is an input of the run"),
        (["jsonl", "-o", "moved.jsonl"], "moved.jsonl is an input of the run"),
        (["openai-batch", "-o", "b.jsonl"], "b.errors.jsonl is an input of the run"),
        (["openai-batch", "-o", "./a.parquet"], "a.parquet is part of the results"),
        (["jsonl", "-o", "a.hidden.parquet"], "a.hidden.parquet is part of the results"),
    ):
        assert f"error: {name}. Name another" in run([*export, *arguments], tmp_path, expect=2).stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    run([*export, "jsonl", "-o", "other.jsonl"], tmp_path)


def test_jsonl_has_one_line_per_output_row(done: Path) -> None:
    run(["export", "out.parquet", "--format", "jsonl"], done)
    lines = [json.loads(text) for text in (done / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = rows_of(done / "out.parquet")
    assert len(lines) == len(rows)
    for found, row in zip(lines, rows, strict=True):
        extra = found.pop("extra", None)
        assert extra == (None if row["extra"] is None else json.loads(row["extra"]))
        assert found == {name: value for name, value in row.items() if value is not None and name != "extra"}
    streamed = run(["export", "out.parquet", "--format", "jsonl", "-o", "-"], done).stdout
    # Both hold the same values; on stdout, characters that a terminal obeys are escaped.
    assert list(map(json.loads, streamed.splitlines())) == list(
        map(json.loads, (done / "out.jsonl").read_bytes().splitlines())
    )
    assert streamed.replace("\n", "").isprintable()


def test_outputs_that_cannot_be_exported(done: Path, tmp_path: Path, model: Path) -> None:
    assert "does not exist" in run(["export", "no.parquet", "--format", "jsonl"], tmp_path, expect=4).stderr
    arguments = ["run", done / "in.jsonl", "--model", model, "--dtype", "float32", "-o", "part.parquet"]
    run([*arguments, "--max-time", "0"], tmp_path, expect=75)
    unfinished = run(["export", "part.parquet", "--format", "jsonl"], tmp_path, expect=4).stderr
    assert "not finished" in unfinished
    (tmp_path / "not.parquet").write_bytes(b"PAR1")
    assert "not a batchgen output" in run(["export", "not.parquet", "--format", "jsonl"], tmp_path, expect=4).stderr
    for shard in ("0/2", "1/2"):
        run([*arguments[:-1], "shards", "--shard", shard, "--limit", "2"], tmp_path)
    assert "batchgen merge" in run(["export", "shards", "--format", "jsonl"], tmp_path, expect=4).stderr
    assert run(["export", done / "out.parquet", "--format", "csv"], tmp_path, expect=2).stderr
    command = ["export", done / "out.parquet", "--format", "openai-batch", "-o", "x.jsonl"]
    assert "is not the one of the run" in run([*command, "--tokenizer", model_path()], tmp_path, expect=6).stderr
    assert "--tokenizer" in run([*command, "--tokenizer", "nowhere"], tmp_path, expect=6).stderr
    assert not list(tmp_path.glob("x*"))
