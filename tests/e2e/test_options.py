"""Options that change a row: chat, truncation, defaults and their sources, carried fields."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from tests.e2e.engines import generate
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
    """tests/request/test_parser.py has every combination."""
    system = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    write_lines(tmp_path / "in.jsonl", [{"text": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}])
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--overwrite", "--include-prompt"]
    command += ["--max-new-tokens", "3"]
    for more, prompts in (([], ["<s>Hi", system]), (["--chat"], [system, system])):
        run([*command, "--system", "Be brief.", *more], tmp_path)
        assert [row["prompt"] for row in rows_of(tmp_path / "out.parquet")] == prompts
    run([*command, "--no-chat"], tmp_path)
    assert "--no-chat" in rows_of(tmp_path / "out.parquet")[1]["error"]["message"]


@pytest.mark.field("input_ids", "max_new_tokens")
def test_truncation(model: Path, tmp_path: Path) -> None:
    ids = [4 + i % 50 for i in range(CONTEXT + 40)]
    row = {"id": "a", "input_ids": ids, "max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
    for side, kept in (("left", ids[-(CONTEXT - 10) :]), ("right", ids[: CONTEXT - 10])):
        found = one(model, tmp_path, row, "--truncate", side, "--include-prompt-ids")
        assert (found["prompt_ids"], found["completion_tokens"]) == (kept, 10)
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


def test_the_models_sampling_defaults(model: Path, tmp_path: Path) -> None:
    """generation_config.json gives the defaults unless --sampling-defaults is `openai`."""
    drawn = {"text": "The quick", "seed": 5, "max_new_tokens": 30, "ignore_eos": True}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    write_lines(tmp_path / "in.jsonl", [drawn, drawn | DEFAULTS, drawn | plain])
    command = ["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32, "--overwrite"]
    for more, same, other in (([], 1, 2), (["--sampling-defaults", "openai"], 2, 1)):
        run([*command, *more], tmp_path)
        ids = [row["output_ids"] for row in rows_of(tmp_path / "out.parquet")]
        assert ids[0] == ids[same] != ids[other]


def test_settings_of_the_model_that_are_not_applied_are_named(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "model")
    (other / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "typical_p": 0.5}')
    write_lines(tmp_path / "in.jsonl", [{"text": "a", "max_new_tokens": 1}])
    line = "not applied, though generation_config.json sets it: `typical_p` 0.5, `no_repeat_ngram_size` 3"
    for command in (["run", "in.jsonl", "-o", "out.parquet", "--overwrite"], ["check", "in.jsonl"]):
        options = ["--model", other, *F32]
        assert run([*command, *options], tmp_path).stderr.count(line) == 1
        assert line not in run([*command, *options, "--sampling-defaults", "openai"], tmp_path).stderr


@pytest.mark.field("ignore_eos", "stop_token_ids")
def test_the_models_own_stop_ids(engine: Engine) -> None:
    """Both ids of generation_config.json end a row, `ignore_eos` ignores them, and `stop_token_ids` still stop."""
    hot = {"text": "x", "temperature": 3.0, "top_k": -1, "top_p": 1.0, "max_new_tokens": 250}
    stopped = [row for row in generate(engine, [hot | {"seed": seed} for seed in range(4)]) if row.stop_kind]
    assert stopped, "at this temperature some row meets an end-of-sequence id"
    for row in stopped:
        assert (row.finish_reason, row.stop_kind) == ("stop", "eos")
        assert list(row.output_ids or ())[-1] == int(row.matched_stop or -1)
    end = list(stopped[0].output_ids or ())
    more = hot | {"seed": stopped[0].seed, "ignore_eos": True}
    on, named = generate(engine, [more, more | {"stop_token_ids": [end[-1]]}])
    assert list(on.output_ids or ())[: len(end)] == end
    assert on.completion_tokens == 250
    assert list(named.output_ids or ()) == end


def test_copied_input(model: Path, tmp_path: Path) -> None:
    """`--carry` and the prompts, which are written on request."""
    row = {"id": "a", "text": "Zażółć", "lang": "de", "meta": {"a": [1, None]}, "n_tokens": 3, **SHORT}
    found = one(model, tmp_path, row, "--carry", "all")
    assert json.loads(found["extra"]) == {"lang": "de", "meta": {"a": [1, None]}, "n_tokens": 3}
    assert (found["prompt"], found["prompt_ids"]) == (None, None)
    for carry in ("none", "lang"):
        found = one(model, tmp_path, row, "--carry", carry, "--include-prompt", "--include-prompt-ids")
        assert (found["extra"], found["prompt"]) == (None, "<s>Zażółć")
        assert len(found["prompt_ids"]) == found["prompt_tokens"]


@pytest.mark.field("max_new_tokens", "min_new_tokens")
def test_special_cases_of_length(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "nothing", "text": "x", "max_new_tokens": 0, "temperature": 0},
        {"id": "two of nothing", "text": "x", "max_new_tokens": 0, "n": 2},
        {"id": "minimum", "text": "x", "temperature": 3.0, "max_new_tokens": 40, "min_new_tokens": 40, "seed": 1},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *F32], tmp_path)
    *empty, minimum = rows_of(tmp_path / "out.parquet")
    assert [(r["id"], r["completion_tokens"], r["finish_reason"], r["text"]) for r in empty] == [
        ("nothing", 0, "length", ""),
        ("two of nothing", 0, "length", ""),
        ("two of nothing", 0, "length", ""),
    ]
    assert minimum["completion_tokens"] == 40
