"""`batchgen verify`: rows replayed alone from what the output records, and what it says where something changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from batchgen.demo import model_path
from tests.e2e.mixed import ADAPTERS, PROCESSOR, mixed_rows
from tests.e2e.rows import mixed_lines, read, rows_of, write_lines
from tests.e2e.runner import run
from tests.models.adapters import KINDS, save_adapter

ROWS = 44
DIFFERENT = 8


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and out.parquet: one row at a time, as a replay runs.

    By PyTorch, since compiled attention rounds a few tokens behind a cached prefix otherwise than a whole prompt.
    """
    folder = tmp_path_factory.mktemp("verify")
    lines = [line for line in mixed_lines(ROWS, seed=21) if not (isinstance(line, dict) and "text" in line)]
    lines += [{"id": f"r{i}", "text": f"{i} the quick", "max_new_tokens": 9, "return_logprob": True} for i in range(12)]
    lines += [{"id": "r0", "input_ids": [9, 8, 7], "n": 3, "max_new_tokens": 6}, {"text": "no name", "seed": 3}]
    write_lines(folder / "in.jsonl", lines)
    options = ["--attention", "torch", "--max-num-seqs", "1", "--on-duplicate-id", "suffix", "--temperature", "1.1"]
    options += ["--dtype", "float32", "--seed", "5"]
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *options], folder)
    return folder


def test_all_rows_are_the_same_alone(done: Path) -> None:
    said = run(["verify", "out.parquet", "--rows", "1000"], done)
    good = {row["row_index"] for row in rows_of(done / "out.parquet") if row["status"] == "ok"}
    lines = said.stdout.splitlines()
    assert lines[-1] == f"{len(good)} of {len(good)} rows are the same"
    assert [line.rsplit(": ", 1)[1] for line in lines[:-1]] == ["same"] * len(good)
    assert [int(line.split()[1]) for line in lines[:-1]] == sorted(good)
    assert any("(id 'r0-2')" in line for line in lines), "the id that --on-duplicate-id suffix gave"


def test_rows_of_a_batch_are_the_same_but_for_rounding(done: Path, model: Path, tmp_path: Path) -> None:
    """Tokens are equal in float32; logprobs may differ in their last bits, and then it says so."""
    shutil.copy(done / "in.jsonl", tmp_path)
    arguments = ["run", "in.jsonl", "--model", model, "--dtype", "float32", "--on-duplicate-id", "suffix"]
    run([*arguments, "-o", "out.parquet"], tmp_path)
    said = run(["verify", "out.parquet", "--rows", "1000"], tmp_path, expect=None)
    assert said.code in (0, DIFFERENT)
    assert "output_ids" not in said.stdout
    assert ("was not deterministic" in said.stdout) == (said.code == DIFFERENT)
    for line in said.stdout.splitlines():
        if "logprobs by at most" in line:
            assert float(line.split("at most ")[1].split()[0]) < 1e-4


def changed(done: Path, folder: Path, name: str, row: int, value: Any) -> None:
    """A copy of the output with one value of one row changed."""
    table = read(done / "out.parquet")
    values = table[name].to_pylist()
    values[table["row_index"].to_pylist().index(row)] = value
    table = table.set_column(table.schema.get_field_index(name), table.field(name), pa.array(values, table[name].type))
    pq.write_table(table, folder / "out.parquet")


def test_a_changed_token_is_found(done: Path, tmp_path: Path) -> None:
    rows = [row for row in rows_of(done / "out.parquet") if row["id"] == "r3"]
    ids = rows[0]["output_ids"]
    ids[4] += 1
    changed(done, tmp_path, "output_ids", rows[0]["row_index"], ids)
    command = ["verify", "out.parquet", done / "in.jsonl", "--rows", "1000"]
    said = run(command, tmp_path, expect=DIFFERENT).stdout.splitlines()
    (odd,) = [line for line in said if "differs" in line]
    assert "(id 'r3'): differs: from prompt 0, sample 0, token 4 on" in odd
    assert f"(recorded {ids[4]}, replayed {ids[4] - 1})" in odd
    good, of = said[-2].split()[0], said[-2].split()[2]
    assert int(good) == int(of) - 1


def test_a_changed_logprob_is_found(done: Path, tmp_path: Path) -> None:
    row = next(row for row in rows_of(done / "out.parquet") if row["id"] == "r5")
    logprobs = row["output_logprobs"]
    logprobs[2] += 0.5
    changed(done, tmp_path, "output_logprobs", row["row_index"], logprobs)
    said = run(["verify", "out.parquet", done / "in.jsonl", "--rows", "1000"], tmp_path, expect=DIFFERENT).stdout
    assert "(id 'r5'): differs: logprobs by at most 0.5 (columns output_logprobs)" in said


def test_a_row_of_which_one_prompt_failed_is_not_replayed(model: Path, tmp_path: Path) -> None:
    source = "def short(logits, rows):\n    assert all(len(row.prompt_ids) < 9 for row in rows)\n    return logits\n"
    (tmp_path / "mine.py").write_text(source)
    ids = [[[5, 6], [5] * 20], [[5, 6], [5] * 3]]
    write_lines(tmp_path / "in.jsonl", [{"input_ids": both, "custom_logit_processor": "short"} for both in ids])
    processor = ["--logit-processor", "short=mine:short"]
    options = ["--dtype", "float32", "--attention", "torch", "--max-num-seqs", "1", "--max-new-tokens", "3"]
    run(["run", "in.jsonl", "--model", model, *options, *processor], tmp_path)
    assert [row["status"] for row in rows_of(tmp_path / "in.out.parquet")] == ["ok", "error", "ok", "ok"]
    said = run(["verify", "in.out.parquet", *processor], tmp_path).stdout
    assert said == "row 1 (id 'row-1'): same\n1 of 1 rows are the same\n"


def test_a_default_id_that_was_taken_already_keeps_its_suffix(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"id": "row-1", "text": "a"}, {"text": "b"}])
    options = ["--dtype", "float32", "--attention", "torch", "--max-num-seqs", "1", "--max-new-tokens", "8"]
    options += ["--temperature", "1", "--on-duplicate-id", "suffix"]
    run(["run", "in.jsonl", "--model", model, *options], tmp_path)
    said = run(["verify", "in.out.parquet"], tmp_path).stdout
    assert said == "row 0 (id 'row-1'): same\nrow 1 (id 'row-1-2'): same\n2 of 2 rows are the same\n"


def test_the_seed_chooses_the_rows(done: Path) -> None:
    first, again, other = (run(["verify", "out.parquet", "--rows", "3", "--seed", s], done).stdout for s in "001")
    assert first == again
    assert first != other
    assert first.endswith("3 of 3 rows are the same\n")


def test_changed_or_missing_inputs(done: Path, tmp_path: Path) -> None:
    shutil.copy(done / "out.parquet", tmp_path)
    missing = run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    assert "in.jsonl cannot be read" in missing
    (tmp_path / "in.jsonl").write_bytes((done / "in.jsonl").read_bytes() + b'{"text": "more"}\n')
    assert "has changed since the run" in run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    run(["verify", "out.parquet", done / "in.jsonl", "--rows", "2"], tmp_path)
    both = ["verify", "out.parquet", done / "in.jsonl", "in.jsonl"]
    assert "had 1 input files, not 2" in run(both, tmp_path, expect=4).stderr


def test_another_model_is_refused(done: Path) -> None:
    refused = run(["verify", "out.parquet", "--model", model_path()], done, expect=2).stderr
    assert "not the run's model" in refused
    assert "model_digest" in refused


def test_a_model_with_other_ends_of_sequence_is_refused(done: Path, model: Path, tmp_path: Path) -> None:
    """They stand beside the weights and the tokenizer, and are in no digest of either."""
    path = shutil.copytree(model, tmp_path / "mended") / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1]}))
    refused = run(["verify", "out.parquet", "--model", path.parent], done, expect=2).stderr
    assert "not the run's model (different: eos_ids)" in refused


def test_an_output_without_ends_of_sequence_is_replayed(done: Path, tmp_path: Path) -> None:
    table = read(done / "out.parquet")
    record = json.loads(table.schema.metadata[b"batchgen.run"])
    assert len(record.pop("eos_ids")) == 2
    metadata = {**table.schema.metadata, b"batchgen.run": json.dumps(record).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "out.parquet")
    run(["verify", "out.parquet", done / "in.jsonl", "--rows", "1"], tmp_path)


def test_the_demonstration_model_in_half_precision(tmp_path: Path) -> None:
    """A single row, which was alone in its run, is the same in bfloat16, too."""
    write_lines(tmp_path / "in.jsonl", [{"text": "What is 17 + 25?", "return_logprob": True, "max_new_tokens": 20}])
    run(["run", "in.jsonl"], tmp_path)
    assert run(["verify", "in.out.parquet"], tmp_path).stdout.endswith("1 of 1 rows are the same\n")


def test_a_job_from_a_pipe_needs_its_file(model: Path, tmp_path: Path) -> None:
    lines = b'{"text": "The quick", "max_new_tokens": 4}\n'
    run(["run", "-", "-o", "out.parquet", "--model", model, "--dtype", "float32"], tmp_path, stdin=lines)
    assert "standard input" in run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    (tmp_path / "saved.jsonl").write_bytes(lines)
    run(["verify", "out.parquet", "saved.jsonl"], tmp_path)


def test_adapters_are_the_runs(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "fr", **KINDS["two"])
    write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "lora_path": "fr", "return_logprob": True}])
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32", "--lora", f"fr={folder}"], tmp_path)
    run(["verify", "in.out.parquet"], tmp_path)
    moved = folder.rename(tmp_path / "moved")
    run(["verify", "in.out.parquet"], tmp_path, expect=6)
    run(["verify", "in.out.parquet", "--lora", f"fr={moved}"], tmp_path)
    save_adapter(model, folder, seed=1, **KINDS["two"])
    assert "adapters" in run(["verify", "in.out.parquet"], tmp_path, expect=2).stderr


def test_processors_are_named_again(model: Path, tmp_path: Path) -> None:
    """What code runs is said by the command line, never by a file."""
    row = {"text": "The quick", "custom_logit_processor": "lean", "custom_params": {"token": 40, "by": 3}}
    write_lines(tmp_path / "in.jsonl", [row])
    processor = ["--logit-processor", "lean=tests.e2e.processors:lean"]
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32", *processor], tmp_path)
    assert "--logit-processor lean=" in run(["verify", "in.out.parquet"], tmp_path, expect=2).stderr
    run(["verify", "in.out.parquet", *processor], tmp_path)


def test_a_library_is_named_again(model: Path, tmp_path: Path) -> None:
    """No footer has one loaded; the run that is made here had none, and is given a record that says otherwise."""
    write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "max_new_tokens": 3}])
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32"], tmp_path)
    table = pq.read_table(tmp_path / "in.out.parquet")
    record = json.loads(table.schema.metadata[b"batchgen.run"])
    record["configuration"]["options"]["flash_library"]["value"] = "./mine.so"
    for kernels, code in (("flash-attn 3 of ./mine.so", 2), ("flash-attn 3 of vLLM 0.21.0", 0)):
        metadata = {**table.schema.metadata, b"batchgen.run": json.dumps({**record, "kernels": kernels}).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "in.out.parquet")
        said = run(["verify", "in.out.parquet"], tmp_path, expect=code).stderr
        assert ("name it again: --flash-library ./mine.so" in said) == (code == 2)
        said = run(["verify", "in.out.parquet", "--flash-library", "./other.so"], tmp_path, expect=2).stderr
        assert "`--flash-library ./other.so`: there is no such file" in said


def test_rows_with_events_and_embeddings(model: Path, tmp_path: Path) -> None:
    """A replay writes no events, whatever file the run wrote them to."""
    rows = [
        {"text": "The quick", "stream": True, "max_new_tokens": 5},
        {"input_embeds": [[0.1 * (i - j % 5) for j in range(64)] for i in range(3)], "max_new_tokens": 5},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32", "--events", "events.jsonl"], tmp_path)
    events = (tmp_path / "events.jsonl").read_bytes()
    assert run(["verify", "in.out.parquet"], tmp_path).stdout.endswith("2 of 2 rows are the same\n")
    assert (tmp_path / "events.jsonl").read_bytes() == events


def test_rows_of_every_field(model: Path, tmp_path: Path) -> None:
    """A job of rows with random draws of all fields, in batches: what is replayed are the same tokens."""
    write_lines(tmp_path / "in.jsonl", mixed_rows(40, seed=4))
    adapters = [save_adapter(model, tmp_path / name, **KINDS[name]) for name in ADAPTERS]
    named = [word for name, path in zip(ADAPTERS, adapters, strict=True) for word in ("--lora", f"{name}={path}")]
    processor = ["--logit-processor", f"{PROCESSOR}=tests.e2e.processors:lean"]
    options = ["--dtype", "float32", "--events", "events.jsonl", *named, *processor]
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *options], tmp_path)
    said = run(["verify", "out.parquet", "--rows", "1000", *processor], tmp_path, expect=None)
    assert said.code in (0, DIFFERENT), said.stderr
    assert len(said.stdout.splitlines()) > 35
    for line in said.stdout.splitlines():
        assert ": same" in line or ": differs: logprobs by at most" in line or not line.startswith("row "), line
        if "at most" in line:
            assert float(line.split("at most ")[1].split()[0]) < 2e-3
    run(["export", "out.parquet", "--format", "openai-batch"], tmp_path)
    for text in (tmp_path / "out.openai.jsonl").read_text().splitlines():
        body = json.loads(text)["response"]["body"]
        (ChatCompletion if body["object"] == "chat.completion" else Completion).model_validate(body, strict=True)
