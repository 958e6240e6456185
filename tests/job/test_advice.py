"""Advice in `check` and in the summary of a run: one line for each thing that is probably not as meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model import CONTEXT, save_model
from tests.e2e.rows import write_lines
from tests.e2e.runner import run

HELLO = [{"role": "user", "content": "Hello"}]
TRUNCATE = ["--truncate", "left"]
Rows = list[dict[str, Any]]

INPUTS: dict[str, tuple[Rows, list[str], str | None]] = {
    "plain text": ([{"text": "Hi"}, {"text": "Yo"}], [], "every row is plain text, and the model has a chat template"),
    "some plain text": ([{"text": "Hi"}, {"messages": HELLO}], [], None),
    "plain text that is meant": ([{"text": "Hi"}], ["--no-chat"], None),
    "a rendered template": ([{"text": "<|im_start|>user\nHi<|im_end|>"}], [], None),
    "conversations": ([{"messages": HELLO}], [], None),
    "ids": ([{"input_ids": [5, 6]}], [], None),
    "two BOS": ([{"input_ids": [0, 0, 5]}, {"input_ids": [0, 5]}], [], "1 of 2 prompts begin with two BOS tokens"),
    "BOS in a message": ([{"messages": [{"role": "user", "content": "<s>"}]}], [], None),
    "equal prompts": ([{"input_ids": [5]}] * 3, [], "all 3 prompts are equal: for more samples of one prompt set `n`"),
    "truncated": (
        [{"input_ids": [5] * CONTEXT}, {"input_ids": [6]}],
        ["--truncate", "left"],
        "1 of 2 prompts were cut",
    ),
    "a constraint": ([{"messages": HELLO, "choice": ["a", "b"]}], [], None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", INPUTS)
def test_advice_on_the_input(name: str, model: Path, tmp_path: Path) -> None:
    rows, options, expected = INPUTS[name]
    write_lines(tmp_path / "in.jsonl", rows)
    done = run(["check", "in.jsonl", "--model", model, *options, "--report", "-"], tmp_path)
    assert advice_of(done.report) == ([] if expected is None else [expected])
    assert ("advice" in done.stderr) == (expected is not None)


def advice_of(report: dict[str, Any]) -> list[str]:
    """The advice, each line cut to the length of the expected beginning of its kind."""
    starts = [expected for _, _, expected in INPUTS.values() if expected is not None]
    return [next((start for start in starts if line.startswith(start)), line) for line in report["advice"]]


@pytest.mark.parametrize(
    ("prompts", "choices", "expected"),
    [
        ([[5], [6], [7]], ["yes"], True),
        ([[5], [6], [7, 8]], ["yes"], True),
        ([[5], [6]], ["yes"], False),
        ([[5]] * 3, ["yes"], False),
        ([[5], [6], [7]], ["yes", "no", "other"], False),
    ],
)
def test_equal_answers_to_different_prompts(
    prompts: list[list[int]], choices: list[str], expected: bool, model: Path, tmp_path: Path
) -> None:
    rows = [{"input_ids": ids, "choice": [choices[i % len(choices)]]} for i, ids in enumerate(prompts)]
    write_lines(tmp_path / "in.jsonl", rows)
    done = run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--report", "-"], tmp_path)
    line = f"all {len(rows)} answers are equal, and the prompts are not: look at what the model sees"
    assert any(found.startswith(line) for found in done.report["advice"]) == expected
    assert (line in done.stderr) == expected


@pytest.mark.parametrize(
    ("end", "is_open"),
    [("<think>\\n", True), ("<think>\\n</think>\\n", False), ("</think><think>", True), ("[THINK]", True), ("", False)],
)
def test_a_constraint_in_an_open_thought(end: str, is_open: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    template = "{{ bos_token }}{{ messages[0].content }}{{ '" + end + "' }}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    given = {"regex": "[ab]", "separate_reasoning": False}
    write_lines(tmp_path / "in.jsonl", [{"messages": HELLO, **given}, {"messages": HELLO}])
    report = run(["check", "in.jsonl", "--model", folder, "--json"], tmp_path).report
    expected = ["1 rows with a constraint begin inside an open thought"]
    assert [line.split(",")[0] for line in report["advice"]] == (expected if is_open else [])


def test_the_summary_says_how_rows_ended(model: Path, tmp_path: Path) -> None:
    drawn = {"messages": HELLO, "temperature": 1.5, "max_new_tokens": 3}
    rows = [{**drawn, "seed": i} for i in range(6)]
    rows += [{"input_ids": [5, 6], "regex": "a{40,50}", "max_new_tokens": 2}, {"input_ids": [5, 6], "choice": ["a"]}]
    rows += [{"input_ids": [7], "temperature": 0, "max_new_tokens": 4, "ignore_eos": True}] * 3
    rows += [{"input_ids": [9], "allowed_token_ids": [1]}]  # only the end of the sequence
    write_lines(tmp_path / "in.jsonl", rows)
    done = run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--report", "-"], tmp_path)
    report = done.report
    assert sum(report["finish_reasons"].values()) == len(rows)
    assert report["finish_reasons"]["length"] >= 9
    assert report["constraints"] == {"met": 1, "failed": 1}
    assert (report["empty_texts"], report["copied_tokens"]) == (1, 8)
    assert report["kernels"]
    assert "kernels:" not in done.stderr
    lines = dict(line.split("  ", 1) for line in done.stderr.splitlines() if "  " in line)
    assert (
        lines["ended by"].strip()
        == f"length {report['finish_reasons']['length']}, stop {report['finish_reasons']['stop']}"
    )
    assert lines["constraints"].strip() == "failed 1, met 1"
    assert "(8 copied from equal rows)" in lines["tokens"]
    assert [line.split(" ", 3)[3].split(":")[0] for line in report["advice"]] == [
        "answers are empty",
        "answers were cut at their token limit",
    ]
    assert lines["next"].strip() == "batchgen show out.parquet"
    assert "Hello" not in done.stderr
