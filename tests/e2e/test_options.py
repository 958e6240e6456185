"""Options that change a row: chat, truncation, defaults and their sources, carried fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model import CONTEXT, DEFAULTS
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

F32 = ["--dtype", "float32"]
SHORT = {"max_new_tokens": 3, "temperature": 0}


def one(model: Path, folder: Path, row: dict[str, Any], *options: object, **more: Any) -> dict[str, Any]:
    """Run one row and return its only output row."""
    write_lines(folder / "in.jsonl", [row])
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--overwrite", *options], folder, **more)
    (output,) = rows_of(folder / "out.parquet")
    return output


@pytest.mark.field("messages")
def test_chat(model: Path, tmp_path: Path) -> None:
    text = {"id": "a", "text": "Hi", **SHORT}
    chat = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    system = "<s><|im_start|>system\nBe brief.<|im_end|>\n" + chat.removeprefix("<s>")
    talk = {"id": "a", "messages": [{"role": "user", "content": "Hi"}], **SHORT}
    prompt = ["--include-prompt"]
    assert one(model, tmp_path, text, *prompt)["prompt"] == "<s>Hi"
    assert one(model, tmp_path, text, *prompt, "--chat")["prompt"] == chat
    assert one(model, tmp_path, text, *prompt, "--chat", "--system", "Be brief.")["prompt"] == system
    assert one(model, tmp_path, talk, *prompt)["prompt"] == chat
    assert one(model, tmp_path, talk, *prompt, "--system", "Be brief.")["prompt"] == system
    assert one(model, tmp_path, text, *prompt, "--system", "Be brief.")["prompt"] == "<s>Hi"
    refused = one(model, tmp_path, talk, "--no-chat", "--max-errors", "1")
    assert refused["error"]["code"] == "invalid_field"
    assert "--no-chat" in refused["error"]["message"]


@pytest.mark.field("input_ids", "max_new_tokens")
def test_truncation(model: Path, tmp_path: Path) -> None:
    ids = [4 + i % 50 for i in range(CONTEXT + 40)]
    row = {"id": "a", "input_ids": ids, "max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
    refused = one(model, tmp_path, row, "--max-errors", "1")["error"]
    assert refused["code"] == "context_length_exceeded"
    assert str(len(ids)) in refused["message"]
    assert str(CONTEXT) in refused["message"]
    left = one(model, tmp_path, row, "--truncate", "left", "--include-prompt-ids")
    right = one(model, tmp_path, row, "--truncate", "right", "--include-prompt-ids")
    assert left["prompt_ids"] == ids[-(CONTEXT - 10) :]
    assert right["prompt_ids"] == ids[: CONTEXT - 10]
    assert left["completion_tokens"] == right["completion_tokens"] == 10
    clipped = one(model, tmp_path, row | {"input_ids": ids[: CONTEXT - 4]})
    assert (clipped["effective_max_new_tokens"], clipped["completion_tokens"]) == (4, 4)
    assert clipped["finish_reason"] == "length"


@pytest.mark.field("max_new_tokens", "n", "return_logprob", "top_logprobs_num", "ignore_eos")
def test_run_wide_flags_are_defaults(model: Path, tmp_path: Path) -> None:
    rows = [
        {"id": "flag", "text": "The quick"},
        {"id": "row", "text": "The quick", "max_new_tokens": 2, "temperature": 1.0, "seed": 3},
        {"id": "stop", "text": "The quick", "stop": ["zzz"]},
        {
            "custom_id": "line",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "*", "prompt": "The quick", "max_tokens": 6},
        },
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    flags = ["--temperature", "0", "--max-new-tokens", "5", "--ignore-eos", "--n", "2", "--return-logprob"]
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, *flags, "--top-logprobs-num", "2"], tmp_path)
    output: dict[str, list[dict[str, Any]]] = {}
    for found in rows_of(tmp_path / "out.parquet"):
        output.setdefault(found["id"], []).append(found)
    assert {name: len(found) for name, found in output.items()} == dict.fromkeys(output, 2)
    assert [output[name][0]["completion_tokens"] for name in ("flag", "row", "stop", "line")] == [5, 2, 5, 6]
    assert output["flag"][0]["output_ids"] == output["flag"][1]["output_ids"], "greedy samples are equal"
    assert output["row"][0]["seed"] == 3
    for found in (row for both in output.values() for row in both):
        assert len(found["output_logprobs"]) == found["completion_tokens"]
        assert len(found["output_top_ids"]) == 2 * found["completion_tokens"]


@pytest.mark.field("return_logprob", "top_logprobs_num", "token_ids_logprob")
def test_options_without_effect_are_reported(model: Path, tmp_path: Path) -> None:
    options = ["--model", model, *F32, "--top-logprobs-num", "2", "--token-ids-logprob", "5", "--max-new-tokens", "2"]
    message = "--top-logprobs-num, --token-ids-logprob have no effect: no row returns logprobs; add --return-logprob"
    for rows, expected in (([{"text": "a"}], True), ([{"text": "a"}, {"text": "b", "return_logprob": True}], False)):
        write_lines(tmp_path / "in.jsonl", rows)
        done = run(["run", "in.jsonl", "-o", "out.parquet", "--overwrite", *options], tmp_path)
        assert (message in done.stderr) is expected
        assert (message in run(["check", "in.jsonl", *options], tmp_path).stderr) is expected
    assert len(rows_of(tmp_path / "out.parquet")[1]["output_top_ids"]) == 4


def test_precedence_of_configuration_sources(model: Path, tmp_path: Path) -> None:
    """Flags, then environment variables, then --config, then ./batchgen.toml."""
    row = {"id": "a", "text": "The quick", "ignore_eos": True}
    (tmp_path / "batchgen.toml").write_text("max_new_tokens = 3\ntemperature = 0\ninclude_prompt = true\n")
    (tmp_path / "job.toml").write_text("max-new-tokens = 4\n")
    env = {"BATCHGEN_MAX_NEW_TOKENS": "5"}
    first = one(model, tmp_path, row)
    assert (first["completion_tokens"], first["prompt"]) == (3, "<s>The quick")
    assert one(model, tmp_path, row, "--config", "job.toml")["completion_tokens"] == 4
    assert one(model, tmp_path, row, "--config", "job.toml", env=env)["completion_tokens"] == 5
    assert one(model, tmp_path, row, "--max-new-tokens", "6", env=env)["completion_tokens"] == 6


def test_the_models_sampling_defaults(model: Path, tmp_path: Path) -> None:
    """generation_config.json gives the defaults unless --sampling-defaults is `openai`."""
    drawn = {"id": "a", "text": "The quick", "seed": 5, "max_new_tokens": 30, "ignore_eos": True}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    by_model = one(model, tmp_path, drawn)
    assert by_model["output_ids"] == one(model, tmp_path, drawn | DEFAULTS)["output_ids"]
    by_openai = one(model, tmp_path, drawn, "--sampling-defaults", "openai")
    assert by_openai["output_ids"] == one(model, tmp_path, drawn | plain)["output_ids"]
    assert by_openai["output_ids"] != by_model["output_ids"]


@pytest.mark.field("ignore_eos", "stop_token_ids")
def test_the_models_own_stop_ids(model: Path, tmp_path: Path) -> None:
    """Both ids of generation_config.json end a row, `ignore_eos` ignores them, and `stop_token_ids` still stop."""
    hot = {"id": "a", "text": "x", "temperature": 3.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 250}
    endings = [one(model, tmp_path, hot | {"seed": seed}) for seed in range(4)]
    stopped = [row for row in endings if row["finish_reason"] == "stop"]
    assert stopped, "at this temperature some row meets an end-of-sequence id"
    for row in stopped:
        assert row["stop_kind"] == "eos"
        assert row["output_ids"][-1] == int(row["matched_stop"])
    end = stopped[0]["output_ids"]
    on = one(model, tmp_path, hot | {"seed": endings.index(stopped[0]), "ignore_eos": True})
    assert on["output_ids"][: len(end)] == end
    assert len(on["output_ids"]) == 250
    named = hot | {"seed": endings.index(stopped[0]), "ignore_eos": True, "stop_token_ids": [end[-1]]}
    assert one(model, tmp_path, named)["output_ids"] == end


@pytest.mark.parametrize(
    ("carry", "kept"),
    [
        ("all", {"lang": "de", "meta": {"a": [1, None]}, "n_tokens": 3}),
        ("none", None),
        ("lang", None),
    ],
)
def test_carry(model: Path, tmp_path: Path, carry: str, kept: dict[str, Any] | None) -> None:
    row = {"id": "a", "text": "x", "lang": "de", "meta": {"a": [1, None]}, "n_tokens": 3, **SHORT}
    extra = one(model, tmp_path, row, "--carry", carry)["extra"]
    assert (None if extra is None else json.loads(extra)) == kept


@pytest.mark.field("text")
def test_prompts_are_written_on_request(model: Path, tmp_path: Path) -> None:
    row = {"id": "a", "text": ["The quick", "Zażółć"], **SHORT}
    write_lines(tmp_path / "in.jsonl", [row])
    command = ["run", "in.jsonl", "--model", model, *F32]
    run([*command, "-o", "without.parquet"], tmp_path)
    run([*command, "-o", "with.parquet", "--include-prompt", "--include-prompt-ids"], tmp_path)
    for found in rows_of(tmp_path / "without.parquet"):
        assert (found["prompt"], found["prompt_ids"]) == (None, None)
    output = rows_of(tmp_path / "with.parquet")
    assert [found["prompt"] for found in output] == ["<s>The quick", "<s>Zażółć"]
    for found in output:
        assert len(found["prompt_ids"]) == found["prompt_tokens"]
        assert found["prompt_ids"][0] == 0


@pytest.mark.field("max_new_tokens", "min_new_tokens", "stop", "no_stop_trim")
def test_special_cases_of_length_and_stop(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "nothing", "text": "x", "max_new_tokens": 0, "temperature": 0},
        {"id": "two of nothing", "text": "x", "max_new_tokens": 0, "n": 2},
        {"id": "minimum", "text": "x", "temperature": 3.0, "max_new_tokens": 40, "min_new_tokens": 40, "seed": 1},
        {"id": "free", "text": "x", "temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32], tmp_path)
    output = rows_of(tmp_path / "out.parquet")
    assert [(r["id"], r["completion_tokens"], r["finish_reason"], r["text"]) for r in output[:3]] == [
        ("nothing", 0, "length", ""),
        ("two of nothing", 0, "length", ""),
        ("two of nothing", 0, "length", ""),
    ]
    assert output[3]["completion_tokens"] == 40
    text = output[4]["text"]
    stop = text[3:5]
    cut = text.index(stop)
    stopped = one(model, tmp_path, rows[3] | {"stop": [stop]})
    kept = one(model, tmp_path, rows[3] | {"stop": stop, "no_stop_trim": True})
    assert (stopped["text"], stopped["stop_kind"], stopped["matched_stop"]) == (text[:cut], "string", stop)
    assert kept["text"] == text[: cut + len(stop)]
    assert stopped["output_ids"] == output[4]["output_ids"][: stopped["completion_tokens"]]
