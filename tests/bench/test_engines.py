"""Engines of `batchgen bench` in this process, with a tiny model: special rows, samples, continuous batching."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from batchgen.bench.engines.engine_transformers import cpu_batching
from batchgen.bench.gate import Check, returned_counts
from batchgen.bench.shapes import adapter_folders, merge_adapter
from batchgen.bench.workloads import MORE_WORKLOADS, AdapterSet, BenchRow, DemoWorkload
from batchgen.demo import model_path
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.bench.fakes import InProcess, in_process

ROWS = [BenchRow([7, 11, 300 + i], 12) for i in range(4)]
_WITH_PICTURES = ("batchgen", "transformers")
BYTES_OF_POSITION = 2 * 2 * 2 * 8 * 4
"""Bytes per cached position: keys and values of two layers with two heads of 8, in float32."""


@pytest.fixture(scope="module")
def ours(folder: Path) -> InProcess:
    return in_process("batchgen", folder)


@pytest.mark.parametrize("name", ["json-constrained", "logprobs", "hidden-states"])
def test_special_rows_of_batchgen_pass_the_gate(folder: Path, ours: InProcess, name: str) -> None:
    workload = MORE_WORKLOADS[name]
    rows = [replace(row, fields=workload.fields if i % workload.every == 0 else {}) for i, row in enumerate(ROWS)]
    Check(name, ours, {}).fields(rows, Tokenizer.load(folder))
    found = ours.generate(rows, {})
    assert [len(ids) for ids in found.outputs] == [12] * 4, "constrained rows keep their length"
    expected = {"logprobs": {"top_logprobs": 20 * 48}, "hidden-states": {"output_states": 48}}.get(name, {})
    assert returned_counts(rows, found.outputs) == expected


@pytest.mark.parametrize("name", ["batchgen", "transformers", "transformers-continuous"])
def test_engines_generate_different_samples_and_concatenate_them(folder: Path, name: str) -> None:
    engine = in_process(name, folder, **({"max_num_seqs": 2} if name == "batchgen" else {}))
    setting = engine.settings[0]
    Check("toy", engine, setting).samples([replace(row, samples=3) for row in ROWS[:2]], replays=name == "batchgen")
    (greedy,) = engine.generate(ROWS[:1], setting).outputs
    assert engine.generate(ROWS[:1], setting).outputs == [greedy], "rows of one sample are still greedy"


def test_rows_of_an_adapter_equal_those_of_the_merged_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pairs = adapter_folders(str(folder), AdapterSet(2))
    merge_adapter(str(folder), pairs[1][1], tmp_path)
    bare, merged = (
        in_process("transformers", path).generate(ROWS, {"batch": 1}).outputs for path in (folder, tmp_path)
    )
    rows = [replace(row, fields={"lora_path": pairs[1][0]}) for row in ROWS]
    Check("toy", in_process("batchgen", folder, lora=pairs), {}).adapter(rows, merged, bare)


def test_engines_read_the_pictures_of_rows() -> None:
    rows = DemoWorkload("toy", "toy", 3, instructions=1, length=(5, 5), output=(6, 6)).rows(2048)
    ours, reference = (in_process(name, model_path()).generate(rows, {"batch": 2}) for name in _WITH_PICTURES)
    assert ours.outputs == reference.outputs
    assert len({tuple(ids) for ids in ours.outputs}) > 1, "prompts differ in their pictures alone"


def test_disabling_prefix_groups_changes_no_token(folder: Path) -> None:
    engine = in_process("batchgen", folder, page_size=4, attention="torch")  # groups save time even for few reads
    rows = [BenchRow([*range(5, 90), i], 4) for i in range(12)]
    grouped, flat = (engine.generate(rows, setting) for setting in ({}, {"flat": 1}))
    assert grouped.outputs == flat.outputs
    reads = flat.counted["decode_kv_reads"]
    assert reads == flat.counted["decode_kv_positions"] > grouped.counted["decode_kv_reads"]


def test_output_depends_on_the_whole_prompt(ours: InProcess) -> None:
    """Otherwise the gate checks nothing: a model that repeats its last token passes with any attention."""
    rows = [BenchRow([start, 11, 12, 13, 14], 6) for start in range(3, 15)]
    assert len({tuple(ids) for ids in ours.generate(rows, {}).outputs}) > len(rows) // 2


def test_continuous_batching_generates_the_same_tokens(folder: Path) -> None:
    """Greedy, with a different length for each request."""
    rows = [BenchRow([5, 6, 7], 3), BenchRow([5, 9], 5)]
    want = in_process("transformers", folder).generate(rows, {"batch": 1}).outputs
    engine = in_process("transformers-continuous", folder).engine
    sent = [asdict(row) for row in rows]
    others = set(threading.enumerate())  # threads of other tests, which may end meanwhile
    assert len(engine.settings) == 2
    for setting in engine.settings:
        engine.prepare(sent, setting)
        (begun,) = set(threading.enumerate()) - others
        assert engine.generate(sent, setting)[0] == want
        assert not begun.is_alive()
    assert set(threading.enumerate()) <= others, "a running thread would prevent the process from exiting"


def test_continuous_batching_allocates_blocks_for_all_rows(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    small = cpu_batching(model, [asdict(BenchRow([5] * 300, 3)), asdict(BenchRow([5], 3, samples=2))], 1024)
    assert (small.num_blocks, small.max_batch_tokens) == (3 + 2 * 2, 1024)
    large = cpu_batching(model, [asdict(BenchRow([5], 1 << 40))], 256)
    assert large.num_blocks * large.page_size * BYTES_OF_POSITION <= 4 << 30
    assert large.num_blocks > small.num_blocks


@pytest.mark.parametrize("name", ["transformers", "transformers-continuous"])
def test_transformers_computes_in_the_fastest_dtype(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.bench.engines.engine_transformers.fastest_dtype", lambda request: "bfloat16")
    assert in_process(name, folder).dtype == "bfloat16"
