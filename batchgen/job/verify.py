"""`batchgen verify`: finished rows once more, each alone, against what the output says of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.config import RunConfig
from batchgen.data.export import finished_results
from batchgen.data.own import own_files
from batchgen.data.read import InputSet, open_inputs
from batchgen.data.replay import Difference, choose_rows, compare
from batchgen.data.rows import RawRow
from batchgen.data.schema import OutputRow, completions_to_table
from batchgen.data.view import Results
from batchgen.embeds import EmbedsStore
from batchgen.engine.engine import Engine
from batchgen.engine.intake import Intake
from batchgen.errors import FingerprintError, InputError, UsageError
from batchgen.job.setup import Setup, prepare
from batchgen.processors import load_processors
from batchgen.request import RequestTable

__all__ = ["verify_job"]

_ID_NAMES = ("id", "rid", "custom_id")
_MODEL_FACTS = ("model_digest", "tokenizer_digest", "template_digest", "eos_ids", "dtype", "implementation", "adapters")

ROUNDING = (
    "The run was not deterministic: in a batch, matrix products round otherwise than for one row alone, in bfloat16 by "
    "much more than in float32. Logprobs then differ a little, and a close choice may fall the other way."
)

ELSEWHERE = (
    "The run was deterministic: a row is the same in every batch, but not on another processor, number of threads or "
    "version of PyTorch."
)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A row replayed: how it differs, or why it could not be run."""

    row_index: int
    id: str
    difference: Difference | None
    refused: str | None = None


def verify_job(out: Path, rows: int, seed: int, changes: Mapping[str, Any]) -> bool:
    """Replay `rows` random finished rows of `out` alone, say on stdout how each compares, and whether all are equal.

    Args:
        out: a finished results file.
        rows: how many rows, at most.
        seed: chooses them.
        changes: options (and `inputs`) that are given again, since files have moved.

    Raises:
        InputError: the output or its inputs are missing, or an input is not what it was.
        FingerprintError: the model, or a logit processor, is not the run's.
        UsageError: a logit processor of the run, or the library that computed its attention, is not named.
    """
    results = finished_results(out)
    run = results.footer
    assert run is not None
    config = RunConfig.restore(run["configuration"], out, changes)
    config = replace(config, engine=replace(config.engine, max_num_seqs=1))
    inputs = _same_inputs(config, run)
    _check_processors(config, run["logit_processors"])
    _check_library(config, run)
    setup = prepare(config, lambda note: None)
    _check_model(setup, run)
    chosen = choose_rows(out, rows, seed)
    same = 0
    for replay in _replays(config, inputs, setup, results, chosen):
        same += replay.difference is None and replay.refused is None
        print(f"row {replay.row_index} (id {replay.id!r}): {_verdict(replay)}")
    print(f"{same:,} of {len(chosen):,} rows are the same")
    if same < len(chosen):
        print(ELSEWHERE if run["deterministic"] else ROUNDING)
    sys.stdout.flush()
    return same == len(chosen)


def _same_inputs(config: RunConfig, run: Mapping[str, Any]) -> InputSet:
    """The input files, which must hold what they held.

    Raises:
        InputError: naming the first that does not.
    """
    remedy = "Name the files as they were: batchgen verify OUT INPUT..."
    recorded = run["inputs"]
    paths = config.inputs if tuple(config.inputs) != tuple(run["configuration"]["inputs"]) else _paths(recorded)
    if "-" in paths:
        raise InputError(f"the run read standard input, which is gone. {remedy}")
    inputs = open_inputs(paths, own_files(config))
    if len(inputs.files) != len(recorded):
        raise InputError(f"the run had {len(recorded)} input files, not {len(inputs.files)}. {remedy}")
    for file, was in zip(inputs.files, recorded, strict=True):
        if (file.size, file.sha256) != (was["size"], was["sha256"]):
            raise InputError(f"{file.path} has changed since the run (its sha256 differs). {remedy}")
    return inputs


def _check_processors(config: RunConfig, recorded: Mapping[str, Any]) -> None:
    """Hold the processors named now to the run's.

    Raises:
        UsageError: one is missing, or cannot be imported.
        FingerprintError: one is not what it was.
    """
    named = load_processors(config.engine.logit_processor)
    for name, (source, digest) in recorded.items():
        if name not in named:
            message = "the run had logit processors, which are code that a file may not name; name them again:"
            raise UsageError(f"{message} --logit-processor {name}={source}")
        if named[name].digest != digest:
            raise FingerprintError(f"the logit processor {name} ({source}) has changed since the run")


def _check_library(config: RunConfig, run: Mapping[str, Any]) -> None:
    """Ask for the library that was named to the run, if its attention was computed by that.

    Raises:
        UsageError: none is named now.
    """
    path = run["configuration"]["options"].get("flash_library", {}).get("value")
    if config.engine.flash_library is None and path is not None and f" of {path}" in str(run.get("kernels")):
        message = (
            "the run's attention was computed by a library, which is code that a file may not name; name it again:"
        )
        raise UsageError(f"{message} --flash-library {path}")


def _paths(recorded: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """The files themselves: what a pattern matches may have changed."""
    return tuple(file["path"] for file in recorded)


def _check_model(setup: Setup, run: Mapping[str, Any]) -> None:
    now = setup.identity
    was = {"eos_ids": now["eos_ids"], **run}  # an output that was made before they were recorded says nothing of them
    odd = [name for name in _MODEL_FACTS if now.get(name) != was.get(name)]
    if odd:
        raise FingerprintError(
            f"{setup.model} is not the run's model (different: {', '.join(odd)}). Name that with --model."
        )


def _replays(
    config: RunConfig, inputs: InputSet, setup: Setup, results: Results, chosen: list[int]
) -> Iterator[_Replay]:
    engine = Engine.from_parts(config.engine, setup.load_model(), setup.tokenizer, setup.encoder.grammars)
    for raw in inputs.pick(chosen, config.prompt_column, config.id_column):
        recorded = list(results.rows(row=raw.index))
        yield _replay(engine, setup, raw, recorded)


def _replay(engine: Engine, setup: Setup, raw: RawRow, recorded: list[dict[str, Any]]) -> _Replay:
    """Run one row as a job of its own, with the id that the output gives it: draws depend on it."""
    name = recorded[0]["id"]
    table = RequestTable(EmbedsStore(setup.spec.embeds_size))
    intake = Intake(table, setup.encoder, setup.defaults, "allow", setup.media_root)
    (taken,) = intake.feed([(raw.index, _named(raw.value or {}, name))])
    if taken.error is not None:
        return _Replay(raw.index, name, None, f"the row is refused now: {taken.error.message}")
    done = [completion for group in engine.start(table).loop.run() for completion in group]
    failed = next((completion.error for completion in done if completion.error is not None), None)
    if failed is not None:
        return _Replay(raw.index, name, None, f"the row fails now: {failed.message}")
    done.sort(key=lambda completion: completion.key)
    replayed = completions_to_table([OutputRow(completion, name) for completion in done]).to_pylist()
    return _Replay(raw.index, name, compare(recorded, replayed))


def _named(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The row under the id of the output: `--on-duplicate-id suffix` may have changed its own, or its default."""
    given = next((key for key in _ID_NAMES if value.get(key) is not None), _ID_NAMES[0])
    return {**value, given: name}


def _verdict(replay: _Replay) -> str:
    if replay.refused is not None:
        return f"differs: {replay.refused}"
    found = replay.difference
    if found is None:
        return "same"
    parts = []
    if found.position is not None and found.sample is not None:
        recorded, replayed = ("the end" if token is None else str(token) for token in found.tokens)
        where = f"prompt {found.sample[0]}, sample {found.sample[1]}, token {found.position}"
        parts.append(f"from {where} on (recorded {recorded}, replayed {replayed})")
    if found.logprob:
        parts.append(f"logprobs by at most {found.logprob:.3g}")
    return f"differs: {'; '.join(parts) or 'equal tokens'} (columns {', '.join(found.columns)})"
