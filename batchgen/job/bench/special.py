"""The gate of rows that ask for more than greedy tokens: what they must give beside, and what it must not change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from batchgen.job.bench.gate import GateRed
from batchgen.job.bench.process import BenchEngine
from batchgen.job.bench.workloads import BenchRow, plain
from batchgen.text.tokenizer import Tokenizer

__all__ = ["check_adapted", "check_fields", "check_samples", "continues_to_json", "gate_samples", "returned_counts"]

_LITERALS: Final = ("true", "false", "null")
_CUT_NUMBER: Final = re.compile(r"-|\.|[eE][+-]?")
"""What may stand at the end of a number that is cut off."""
_CUT_ESCAPE: Final = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")


def check_fields(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], tokenizer: Tokenizer
) -> None:
    """Hold rows with fields against the same rows without them, by the same engine, whose plain ids were checked.

    Rows that are held to a schema must be the beginning of a JSON text; others keep their ids. What is returned beside
    the ids is counted.

    Raises:
        GateRed: they differ, or something is missing.
    """
    found = engine.generate(rows, setting)
    expected = engine.generate(plain(rows), setting).outputs
    for number, (row, ids, same) in enumerate(zip(rows, found.outputs, expected, strict=True)):
        if "json_schema" in row.fields:
            if not continues_to_json(text := tokenizer.decode(ids)):
                raise _red(workload, engine, f"row {number} is held to a JSON schema and begins {text!r}")
        elif "lora_path" not in row.fields and ids != same:
            raise _red(workload, engine, f"row {number} has other ids with {', '.join(row.fields)} than without")
    for name, count in returned_counts(rows, found.outputs).items():
        if found.counted.get(name) != count:
            raise _red(workload, engine, f"{found.counted.get(name)} {name.replace('_', ' ')} came back, not {count}")


def check_adapted(
    workload: str,
    engine: BenchEngine,
    setting: Mapping[str, int],
    rows: Sequence[BenchRow],
    merged: Sequence[Sequence[int]],
    bare: Sequence[Sequence[int]],
) -> None:
    """Hold rows of one adapter against a model that has it merged.

    Args:
        workload: its name, for the message.
        engine: with the adapters loaded.
        setting: the engine's.
        rows: of that adapter.
        merged: the reference's ids with the merged weights.
        bare: the reference's ids without the adapter.

    Raises:
        GateRed: ids differ from the merged model's, or the adapter changes nothing.
    """
    if list(merged) == list(bare):
        raise _red(workload, engine, "the adapter changes no row: there is nothing to check it by")
    outputs = engine.generate(rows, setting).outputs
    for number, (ids, expected) in enumerate(zip(outputs, merged, strict=True)):
        if ids != list(expected):
            raise _red(workload, engine, f"row {number} of an adapter gives {ids}, the merged model {list(expected)}")


def check_samples(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], *, replays: bool
) -> None:
    """Hold drawn samples to their number, length and variety and, where the engine `replays`, to their seeds.

    Raises:
        GateRed: samples are missing, all alike, or others when drawn again.
    """
    outputs = engine.generate(rows, setting).outputs
    for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        if len(ids) != row.samples * row.max_new:
            raise _red(workload, engine, f"row {number} has {len(ids)} ids, not {row.samples} samples of {row.max_new}")
        samples = {tuple(ids[at : at + row.max_new]) for at in range(0, len(ids), row.max_new)}
        if len(samples) == 1:
            raise _red(workload, engine, f"the {row.samples} samples of row {number} are all the same: not drawn")
    if replays and engine.generate(rows, setting).outputs != outputs:
        raise _red(workload, engine, "samples drawn again from the same seeds are others")


def returned_counts(rows: Sequence[BenchRow], outputs: Sequence[Sequence[int]]) -> dict[str, int]:
    """What must come back beside these ids: names as an engine's counted quantities have them."""
    counts = {"top_logprobs": 0, "output_states": 0}
    for row, ids in zip(rows, outputs, strict=True):
        counts["top_logprobs"] += row.fields.get("top_logprobs_num", 0) * len(ids)
        if wanted := row.fields.get("return_hidden_states"):
            counts["output_states"] += len(wanted["layers"]) * len(ids)
    return {name: count for name, count in counts.items() if count}


def continues_to_json(text: str) -> bool:
    """Whether some text begins with `text` and is JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if not rest.strip() or error.msg.startswith("Unterminated string"):
            return True
        if error.msg.startswith("Invalid \\u"):
            return _CUT_ESCAPE.fullmatch(rest) is not None
        return _CUT_NUMBER.fullmatch(rest) is not None or any(word.startswith(rest) for word in _LITERALS)
    return True


def gate_samples(rows: Sequence[BenchRow], samples: int) -> list[BenchRow]:
    """Two of the gate's rows, with samples."""
    return [replace(row, samples=samples) for row in rows[:2]]


def _red(workload: str, engine: BenchEngine, what: str) -> GateRed:
    return GateRed(f"correctness gate red, no figures: {engine.name} on {workload} in {engine.dtype}: {what}")
