"""`batchgen run --lora`: adapters on the command line, in the fingerprint and in OpenAI lines; invalid adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.data.results_file import read_footer
from tests.e2e.rows import read, rows_of, write_lines
from tests.e2e.runner import run
from tests.models.adapters import KINDS, adapted_logits, edit_config, save_adapter

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `two` and `all`."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("two", "all")):
        save_adapter(model, folder / name, seed=seed, **KINDS[name])
    return folder


def lines(count: int = 30) -> list[dict[str, Any]]:
    texts = [f"The quick brown fox {i % 7}" for i in range(count)]
    native = [
        {"id": f"n{i}", "text": text, "lora_path": (None, "two", "all")[i % 3], **GREEDY}
        for i, text in enumerate(texts)
    ]
    body = {"prompt": texts[0], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions"}
    openai = [
        {"custom_id": f"o-{name}", **line, "body": {**body, "model": f"*:{name}" if name else "*"}}
        for name in ("", "two", "all")
    ]
    return [*native, *openai]


@pytest.fixture
def command(model: Path, adapters: Path, tmp_path: Path) -> list[Any]:
    write_lines(tmp_path / "in.jsonl", lines())
    named = [option for name in ("two", "all") for option in ("--lora", f"{name}={adapters / name}")]
    return ["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--dtype", "float32", *named]


def texts(file: Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in rows_of(file)}


@pytest.mark.field("lora_path", "model")
def test_a_run_with_adapters(command: list[Any], tmp_path: Path, adapters: Path) -> None:
    run(command, tmp_path)
    done = read(tmp_path / "out.parquet")
    assert set(done["status"].to_pylist()) == {"ok"}
    found = texts(tmp_path / "out.parquet")
    assert [found["o-"], found["o-two"], found["o-all"]] == [found["n0"], found["n7"], found["n14"]]
    assert len({found["o-"], found["o-two"], found["o-all"]}) == 3
    footer = read_footer(tmp_path / "out.parquet")
    assert footer is not None
    assert set(footer["adapters"]) == {"two", "all"}
    # One row at a time through transformers gives the same texts.
    alone = [*command, "--max-num-seqs", "1", "--model-impl", "transformers", "--overwrite"]
    run(alone, tmp_path)
    assert texts(tmp_path / "out.parquet") == found


def test_other_adapters_are_another_job(command: list[Any], tmp_path: Path, adapters: Path) -> None:
    """Other weights, another name, and one adapter fewer. The same adapter elsewhere is the same job."""
    run(command, tmp_path)
    two = f"two={adapters / 'two'}"
    moved, other = (shutil.copytree(adapters / "two", tmp_path / name) for name in ("moved", "other"))
    edit_config(other, lora_alpha=99)
    for word in (f"two={other}", f"too={adapters / 'two'}"):
        done = run([word if given == two else given for given in command], tmp_path, expect=2)
        assert "is not this job's output" in done.stderr
    assert "is not this job's output" in run(command[:-2], tmp_path, expect=2).stderr
    assert "nothing to do" in run([f"two={moved}" if given == two else given for given in command], tmp_path).stderr


def test_an_invalid_adapter_ends_the_run_before_rows_are_read(
    model: Path, adapters: Path, tmp_path: Path, command: list[Any]
) -> None:
    edit_config(save_adapter(model, tmp_path / "dora", **KINDS["two"]), use_dora=True)
    for path, message in (
        (tmp_path / "dora", "use_dora"),
        (tmp_path / "none", "there is no folder"),
        (model, "adapter_con"),
    ):
        done = run([*command[:8], "--lora", f"bad={path}"], tmp_path, expect=6)
        assert "The adapter bad (--lora) cannot be used" in done.stderr
        assert message in done.stderr
        assert not (tmp_path / "out.parquet.work").exists()


def test_check_counts_prefixes_by_adapter(command: list[Any], tmp_path: Path) -> None:
    """`check` predicts the run's counts: equal texts with different adapters share no prefix."""

    def planned() -> int:
        found: int = json.loads(run(["check", *command[1:], "--json"], tmp_path).stdout)["distinct_prompt_tokens"]
        return found

    adapted, ran = planned(), run([*command, "--report", "-"], tmp_path).report
    assert adapted == ran["distinct_prompt_tokens"] == ran["computed_prompt_tokens"]
    plain = [{**line, "lora_path": None} for line in lines(30)[:30]]
    write_lines(tmp_path / "in.jsonl", [*plain, *({**line, "id": f"b{i}"} for i, line in enumerate(plain))])
    assert planned() * 2 < adapted


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_logprobs_of_an_adapted_head(model: Path, tmp_path: Path, implementation: Any) -> None:
    """Of prompts and outputs, with rows of no adapter in the same steps."""
    folder = save_adapter(model, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["lm_head"])
    values = {"return_logprob": True, "logprob_start_len": 0, "temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    ids = [[9, 40, 17, 23, 8], [11, 5, 60]]
    rows = [
        {"id": f"{i} {name}", "input_ids": x, "lora_path": name, **values}
        for i, x in enumerate(ids)
        for name in ("a", None)
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    options = ["--model", model, "--dtype", "float32", "--device", "cpu", "--model-impl", implementation]
    run(["run", "in.jsonl", "-o", "out.parquet", *options, "--lora", f"a={folder}"], tmp_path)
    for row in rows_of(tmp_path / "out.parquet"):
        number, _, name = row["id"].partition(" ")
        prompt, output = ids[int(number)], row["output_ids"]
        (logits,) = adapted_logits(model, folder if name == "a" else None, [torch.tensor([*prompt, *output])])
        logprobs = logits.log_softmax(-1)
        expected = [float(logprobs[i, token]) for i, token in enumerate([*prompt, *output][1:])]
        got = [*row["input_logprobs"][1:], *row["output_logprobs"]]
        assert got == pytest.approx(expected, abs=1e-3), row["id"]
