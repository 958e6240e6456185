"""The weights are part of a job's identity: all of them, and every other file that results depend on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchgen.job.setup as setup
from batchgen.data.results_file import read_footer
from batchgen.models.check import check_model
from tests.e2e.rows import assert_same, mixed_lines, read, write_lines
from tests.e2e.runner import interrupt, parts_of, run
from tests.models.adapters import KINDS, save_adapter

TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, next to an input."""
    write_lines(tmp_path / "in.jsonl", mixed_lines(60, seed=5))
    return shutil.copytree(model, tmp_path / "model")


COMMAND = ["run", "in.jsonl", "-o", "out.parquet", "--model", "model", "--dtype", "float32"]


def zero(folder: Path, share: float = 1 / 3) -> None:
    """Set the first `share` of a tensor to zero and keep the file's size and modification time."""
    info = check_model(folder).folder.tensors[TENSOR]
    status = info.file.stat()
    with info.file.open("r+b") as stream:
        stream.seek(info.start)
        stream.write(bytes(int(info.nbytes * share)))
    os.utime(info.file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = info.file.stat()
    assert (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def test_other_weights_never_continue_a_job(own: Path, model: Path, tmp_path: Path) -> None:
    """A third of a tensor is zero: refused whichever way, nothing touched; with its own weights the job goes on."""
    parts = interrupt(COMMAND, tmp_path)
    zero(own)
    files = [path for path in tmp_path.glob("out.parquet.work/**/*") if path.is_file() and path.name != "lock"]
    before = {path: path.read_bytes() for path in files}
    for options in ([], ["--retry-errors"], ["--resume-anyway"], ["--reuse", "out.parquet"]):
        refused = run([*COMMAND, *options], tmp_path, expect=2).stderr
        assert "the weights differ (model.safetensors was sha256" in refused, options
    assert {path: path.read_bytes() for path in before} == before
    assert len(parts_of(tmp_path / "out.parquet")) == parts
    shutil.copy2(model / "model.safetensors", own)
    run(COMMAND, tmp_path)
    run([*COMMAND, "-o", "fresh.parquet"], tmp_path)
    assert_same(read(tmp_path / "out.parquet"), read(tmp_path / "fresh.parquet"))
    zero(own, 1e-3)
    for options in ([], ["--retry-errors"], ["--resume-anyway"], ["-o", "o.parquet", "--reuse", "out.parquet"]):
        assert "the weights differ" in run([*COMMAND, *options], tmp_path, expect=2).stderr, options
    assert "(different: weights)" in run(["verify", "out.parquet"], tmp_path, expect=2).stderr


def test_outputs_of_other_weights_are_not_merged(own: Path, tmp_path: Path) -> None:
    shard = [*COMMAND, "-o", "out", "--shard"]
    for number in ("0/2", "1/2"):
        run([*shard, number], tmp_path)
    run([*COMMAND, "-o", "a.parquet"], tmp_path)
    zero(own)
    assert "the weights differ" in run([*shard, "1/2"], tmp_path, expect=2).stderr
    run([*shard, "1/2", "--overwrite"], tmp_path)
    merged = run(["merge", "out", "-o", "merged.parquet"], tmp_path, expect=2).stderr
    assert "are shards of different jobs (the weights differ (model.safetensors was sha256" in merged
    run([*COMMAND, "-o", "b.parquet"], tmp_path)
    both = ["merge", "a.parquet", "b.parquet", "-o", "ab.parquet", "--allow-duplicate-ids"]
    assert "the weights differ" in run(both, tmp_path, expect=2).stderr
    assert not list(tmp_path.glob("merged*")) + list(tmp_path.glob("ab*"))


def test_an_output_that_does_not_record_all_weights(own: Path, tmp_path: Path) -> None:
    """As written by versions that hashed samples of them: nothing is said of the weights that is not known."""
    run(COMMAND, tmp_path)
    table = pq.read_table(tmp_path / "out.parquet")
    record = json.loads(table.schema.metadata[b"batchgen.run"])
    del record["weights"], record["job"]["model weights"]
    record |= {"fingerprint": "0" * 64, "model_digest": "1" * 64}
    metadata = {**table.schema.metadata, b"batchgen.run": json.dumps(record).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "out.parquet")
    assert "the weights may differ (a version that did not hash" in run(COMMAND, tmp_path, expect=2).stderr
    assert "did not hash all weights" in run(["verify", "out.parquet"], tmp_path, expect=2).stderr


def test_lines_of_other_weights_are_not_replaced(own: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "-o", "out.jsonl"]
    run(command, tmp_path)
    assert "nothing to do" in run(command, tmp_path).stderr
    zero(own)
    assert "is not this job's output" in run(command, tmp_path, expect=2).stderr


def test_other_adapter_weights_never_continue_a_job(own: Path, tmp_path: Path) -> None:
    adapter = save_adapter(own, tmp_path / "fr", **KINDS["two"])
    write_lines(tmp_path / "in.jsonl", [{"text": f"The quick {i}", "lora_path": "fr"} for i in range(30)])
    command = [*COMMAND, "--lora", f"fr={adapter}"]
    interrupt(command, tmp_path)
    file = adapter / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "the adapters differ (fr was sha256" in run(command, tmp_path, expect=2).stderr


def test_where_the_identity_is_stored(own: Path, tmp_path: Path) -> None:
    """In run.json, the parts and the footer; `check` prints the same fingerprint without loading weights."""
    weights = {"model.safetensors": hashlib.sha256((own / "model.safetensors").read_bytes()).hexdigest()}
    planned = json.loads(run(["check", *COMMAND[1:], "--json"], tmp_path).stdout)
    interrupt(COMMAND, tmp_path)
    state = json.loads((tmp_path / "out.parquet.work" / "run.json").read_bytes())
    assert state["info"]["model weights"] == weights == planned["model"]["weights"]
    for part in parts_of(tmp_path / "out.parquet"):
        assert pq.read_metadata(part).metadata[b"batchgen.fingerprint"].decode() == state["fingerprint"]
    report = run([*COMMAND, "--report", "-"], tmp_path).report
    footer = read_footer(tmp_path / "out.parquet")
    assert footer is not None
    assert footer["weights"] == footer["job"]["model weights"] == weights
    assert planned["fingerprint"] == report["fingerprint"] == footer["fingerprint"] == state["fingerprint"]


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = file.read_bytes()
        assert old in content
        file.write_bytes(content.replace(old, new, 1))

    return change


def last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


FILES: dict[str, Callable[[Path], None]] = {
    "model.safetensors": last_bit,
    "config.json": replaced(b"}", b" }"),
    "generation_config.json": replaced(b"0.8", b"0.7"),
    "tokenizer.json": replaced(b"}", b" }"),
    "tokenizer_config.json": replaced(b"}", b" }"),
    "chat_template.jinja": replaced(b"assistant", b"assistent"),
}


def test_every_file_that_results_depend_on_counts(own: Path, model: Path, tmp_path: Path) -> None:
    """Each file of a model folder changes the fingerprint; another file does not."""
    write_lines(tmp_path / "in.jsonl", [{"text": "The quick", "max_new_tokens": 4}])

    def fingerprint() -> str:
        return str(json.loads(run(["check", *COMMAND[1:], "--json"], tmp_path).stdout)["fingerprint"])

    first = fingerprint()
    (own / "README.md").write_text("A model.")
    assert fingerprint() == first
    assert FILES.keys() == {file.name for file in model.iterdir()}
    found = {first}
    for name, change in FILES.items():
        change(own / name)
        found.add(fingerprint())
        shutil.copy2(model / name, own)
    assert len(found) == len(FILES) + 1
    assert fingerprint() == first


def test_weights_that_change_while_they_are_loaded(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = setup.load_checked

    def load_and_change(*given: Any) -> Any:
        loaded = load(*given)
        zero(own)
        return loaded

    monkeypatch.setattr("batchgen.job.setup.load_checked", load_and_change)
    stopped = run(COMMAND, tmp_path, expect=6).stderr
    assert "model.safetensors changed while the model was read" in stopped
    assert not list(tmp_path.glob("out*"))
