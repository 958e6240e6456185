"""Helpers of the tests of batchgen.data: rows, work folders and readers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchgen.data.schema import OutputRow
from batchgen.data.store.damage import Note, ignore
from batchgen.data.store.expected import ExpectedKeys
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.work_folder import RunIdentity, WorkFolder, output_paths
from batchgen.data.store.work_owner import Policy, open_work
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.completion import Completion

IDENTITY = RunIdentity("f00d")


def sample(row: int, prompt: int = 0, index: int = 0, size: int = 4) -> OutputRow:
    """A finished sample whose values are determined by its key."""
    rng = np.random.default_rng([row, prompt, index])
    ids: Any = rng.integers(0, 1000, size=size).astype(np.int32)
    logprobs: Any = rng.random(size).astype(np.float32)
    completion = Completion(
        row,
        prompt,
        index,
        finish_reason="stop" if row % 2 else "length",
        stop_kind="eos" if row % 2 else None,
        text=f"text of {row}.{prompt}.{index} \u2028 é",
        output_ids=ids if row % 3 else ids.tolist(),
        prompt_tokens=row % 7,
        completion_tokens=size,
        cached_tokens=0,
        output_logprobs=logprobs if row % 5 == 0 else None,
        cumulative_logprob=-float(row),
        seed=row - 5,
        effective_max_new_tokens=128,
    )
    return OutputRow(completion, f"id-{row}", '{"k":1}' if row % 4 == 0 else None)


def failed(row: int, prompt: int = 0, code: ErrorCode = ErrorCode.INVALID_JSON) -> OutputRow:
    """An error row."""
    return OutputRow(Completion(row, prompt, error=ErrorInfo(code, f"row {row} is bad", "field")), f"id-{row}")


def group(row: int, prompt: int = 0, samples: int = 1, size: int = 4) -> list[OutputRow]:
    """All samples of a prompt."""
    return [sample(row, prompt, index, size) for index in range(samples)]


def begin(
    out: Path, identity: RunIdentity = IDENTITY, policy: Policy = "resume", note: Note = ignore, **info: Any
) -> WorkFolder:
    """Open the work folder of an output that is not complete."""
    work = open_work(output_paths(out, identity.shard), identity, info, policy, note=note)
    assert work is not None
    return work


def commit(work: WorkFolder, groups: Iterable[list[OutputRow]], every: int = 3) -> None:
    """Commit groups in parts of about `every` rows."""
    with PartWriter(work, commit_every=every) as writer:
        rows = 0
        for rows_of_prompt in groups:
            writer.add(rows_of_prompt)
            rows += len(rows_of_prompt)
            if rows >= every:
                writer.flush()
                rows = 0


def expect(keys: Iterable[tuple[int, int, int]]) -> ExpectedKeys:
    """The expected keys for (row, prompt, samples) each."""
    expected = ExpectedKeys()
    for row, prompt, samples in keys:
        expected.add(row, prompt, samples)
    return expected


def stored(out: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def stored_keys(out: Path) -> list[tuple[int, int, int]]:
    """The keys of a results file, as stored."""
    return [(row["row_index"], row["prompt_index"], row["sample_index"]) for row in stored(out)]
