"""`batchgen verify`: rows replayed alone from the output's footer, and the differences that it reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.demo import model_path
from tests.e2e.rows import mixed_lines, read, rows_of, write_lines
from tests.e2e.runner import run
from tests.models.adapters import KINDS, save_adapter

ROWS = 26
DIFFERENT = 8


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and out.parquet, run one row at a time, as a replay runs.

    With `--attention torch`: the compiled backend rounds a suffix of a cached prefix differently from a whole prompt.
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


def test_all_rows_are_the_same_when_replayed_alone(done: Path) -> None:
    result = run(["verify", "out.parquet", "--rows", "1000"], done)
    good = {row["row_index"] for row in rows_of(done / "out.parquet") if row["status"] == "ok"}
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{len(good)} of {len(good)} rows are the same"
    assert [line.rsplit(": ", 1)[1] for line in lines[:-1]] == ["same"] * len(good)
    assert [int(line.split()[1]) for line in lines[:-1]] == sorted(good)
    assert any("(id 'r0-2')" in line for line in lines), "the id that --on-duplicate-id suffix gave"


def test_rows_of_a_batch_differ_only_by_rounding(done: Path, model: Path, tmp_path: Path) -> None:
    """Tokens are equal in float32; logprobs may differ in their last bits, which verify reports."""
    shutil.copy(done / "in.jsonl", tmp_path)
    arguments = ["run", "in.jsonl", "--model", model, "--dtype", "float32", "--on-duplicate-id", "suffix"]
    run([*arguments, "-o", "out.parquet"], tmp_path)
    result = run(["verify", "out.parquet", "--rows", "12"], tmp_path, expect=None)
    assert result.code in (0, DIFFERENT)
    assert "output_ids" not in result.stdout
    assert ("was not deterministic" in result.stdout) == (result.code == DIFFERENT)
    for line in result.stdout.splitlines():
        if "logprobs by at most" in line:
            assert float(line.split("at most ")[1].split()[0]) < 1e-4


def test_changed_values_are_found(done: Path, tmp_path: Path) -> None:
    """A token of one row and a logprob of another."""
    table = read(done / "out.parquet")
    rows = table.to_pylist()
    token = next(row for row in rows if row["id"] == "r3")
    logprob = next(row for row in rows if row["id"] == "r5")
    token["output_ids"][4] += 1
    logprob["output_logprobs"][2] += 0.5
    pq.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "out.parquet")
    command = ["verify", "out.parquet", done / "in.jsonl", "--rows", "1000"]
    result = run(command, tmp_path, expect=DIFFERENT).stdout.splitlines()
    first, second = (line for line in result if "differs" in line)
    new = token["output_ids"][4]
    assert "(id 'r3'): differs: from prompt 0, sample 0, token 4 on" in first
    assert f"(recorded {new}, replayed {new - 1})" in first
    assert "(id 'r5'): differs: logprobs by at most 0.5 (columns output_logprobs)" in second
    good, of = result[-2].split()[0], result[-2].split()[2]
    assert int(good) == int(of) - 2


def test_a_row_with_a_failed_prompt_is_not_replayed(model: Path, tmp_path: Path) -> None:
    source = "def short(logits, rows):\n    assert all(len(row.prompt_ids) < 9 for row in rows)\n    return logits\n"
    (tmp_path / "mine.py").write_text(source)
    ids = [[[5, 6], [5] * 20], [[5, 6], [5] * 3]]
    write_lines(tmp_path / "in.jsonl", [{"input_ids": both, "custom_logit_processor": "short"} for both in ids])
    processor = ["--logit-processor", "short=mine:short"]
    options = ["--dtype", "float32", "--attention", "torch", "--max-num-seqs", "1", "--max-new-tokens", "3"]
    run(["run", "in.jsonl", "--model", model, *options, *processor], tmp_path)
    assert [row["status"] for row in rows_of(tmp_path / "in.out.parquet")] == ["ok", "error", "ok", "ok"]
    result = run(["verify", "in.out.parquet", *processor], tmp_path).stdout
    assert result == "row 1 (id 'row-1'): same\n1 of 1 rows are the same\n"


def test_the_seed_chooses_the_rows(done: Path) -> None:
    first, again, other = (run(["verify", "out.parquet", "--rows", "3", "--seed", seed], done).stdout for seed in "001")
    assert first == again != other
    assert first.endswith("3 of 3 rows are the same\n")


def test_changed_or_missing_inputs(done: Path, tmp_path: Path) -> None:
    shutil.copy(done / "out.parquet", tmp_path)
    missing = run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    assert "in.jsonl cannot be read" in missing
    content = (done / "in.jsonl").read_bytes()
    for changed in (content + b'{"text": "more"}\n', content.replace(b"the quick", b"the quiet")):
        (tmp_path / "in.jsonl").write_bytes(changed)
        assert "has changed since the run" in run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    run(["verify", "out.parquet", done / "in.jsonl", "--rows", "2"], tmp_path)
    both = ["verify", "out.parquet", done / "in.jsonl", "in.jsonl"]
    assert "had 1 input files, not 2" in run(both, tmp_path, expect=4).stderr


def test_another_model_is_refused(done: Path, model: Path, tmp_path: Path) -> None:
    """End-of-sequence ids are in generation_config.json, which neither digest covers."""
    path = shutil.copytree(model, tmp_path / "other-eos") / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1]}))
    for other, different in ((model_path(), "weights"), (path.parent, "(different: eos_ids)")):
        refused = run(["verify", "out.parquet", "--model", other], done, expect=2).stderr
        assert "not the model of the run" in refused
        assert different in refused


def test_an_output_without_recorded_eos_ids_is_replayed(done: Path, tmp_path: Path) -> None:
    table = read(done / "out.parquet")
    record = json.loads(table.schema.metadata[b"batchgen.run"])
    assert len(record.pop("eos_ids")) == 2
    metadata = {**table.schema.metadata, b"batchgen.run": json.dumps(record).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "out.parquet")
    run(["verify", "out.parquet", done / "in.jsonl", "--rows", "1"], tmp_path)


def test_a_row_that_ran_alone_is_the_same_in_bfloat16(tmp_path: Path) -> None:
    """With the demonstration model and its own dtype."""
    write_lines(tmp_path / "in.jsonl", [{"text": "What is 17 + 25?", "return_logprob": True, "max_new_tokens": 20}])
    run(["run", "in.jsonl"], tmp_path)
    assert run(["verify", "in.out.parquet"], tmp_path).stdout.endswith("1 of 1 rows are the same\n")


def test_a_job_from_standard_input_needs_a_saved_copy(model: Path, tmp_path: Path) -> None:
    lines = b'{"text": "The quick", "max_new_tokens": 4}\n'
    run(["run", "-", "-o", "out.parquet", "--model", model, "--dtype", "float32"], tmp_path, stdin=lines)
    assert "standard input" in run(["verify", "out.parquet"], tmp_path, expect=4).stderr
    (tmp_path / "saved.jsonl").write_bytes(lines)
    run(["verify", "out.parquet", "saved.jsonl"], tmp_path)


def test_adapters_must_be_those_of_the_run(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "fr", **KINDS["two"])
    write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "lora_path": "fr", "return_logprob": True}])
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32", "--lora", f"fr={folder}"], tmp_path)
    run(["verify", "in.out.parquet"], tmp_path)
    moved = folder.rename(tmp_path / "moved")
    run(["verify", "in.out.parquet"], tmp_path, expect=6)
    run(["verify", "in.out.parquet", "--lora", f"fr={moved}"], tmp_path)
    save_adapter(model, folder, seed=1, **KINDS["two"])
    assert "adapters" in run(["verify", "in.out.parquet"], tmp_path, expect=2).stderr


def test_a_flash_library_must_be_named_again(model: Path, tmp_path: Path) -> None:
    """Verify loads no library that a footer names. The run here used none; its footer is edited to name one."""
    write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "max_new_tokens": 3}])
    run(["run", "in.jsonl", "--model", model, "--dtype", "float32"], tmp_path)
    table = pq.read_table(tmp_path / "in.out.parquet")
    record = json.loads(table.schema.metadata[b"batchgen.run"])
    record["configuration"]["options"]["flash_library"]["value"] = "./mine.so"
    for kernels, code in (("flash-attn 3 of ./mine.so", 2), ("flash-attn 3 of vLLM 0.21.0", 0)):
        metadata = {**table.schema.metadata, b"batchgen.run": json.dumps({**record, "kernels": kernels}).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "in.out.parquet")
        result = run(["verify", "in.out.parquet"], tmp_path, expect=code).stderr
        assert ("Name it again: --flash-library ./mine.so" in result) == (code == 2)
        result = run(["verify", "in.out.parquet", "--flash-library", "./other.so"], tmp_path, expect=2).stderr
        assert "`--flash-library ./other.so`: there is no such file" in result
