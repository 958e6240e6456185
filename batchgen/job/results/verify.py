"""`batchgen verify`: recompute finished rows, each alone, and compare them with the output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen.config.run_config import RunConfig
from batchgen.data.out.compare import Difference, choose_rows, compare
from batchgen.data.out.export import finished_results
from batchgen.data.out.merge_jobs import is_merged
from batchgen.data.out.view import Results
from batchgen.data.read.input_set import InputSet
from batchgen.data.schema import OutputRow, asked_columns, completions_to_table
from batchgen.engine.engine import Engine
from batchgen.errors import FingerprintError, InputError, UsageError
from batchgen.job.preflight import CheckedJob, check_engine_model
from batchgen.job.results.inputs import found_inputs, same_inputs
from batchgen.job.rows.request_hashes import MODEL_FACTS
from batchgen.job.setup import Setup, prepare
from batchgen.request.fields.declared import ID_NAMES
from batchgen.request.printable import printable
from batchgen.request.processors import LoadedProcessor, load_processors
from batchgen.request.rows.raw_row import RawRow
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import RequestTable

_SAME = "same"
"""Verdict on a row that was computed as before."""
_MODEL_FACTS = (*MODEL_FACTS, "template_digest", "adapters")

ROUNDING = (
    "The run was not deterministic: matrix products round differently in a batch than for one row alone, much more so "
    "in bfloat16 than in float32. Logprobs then differ a little, and where two tokens are close, another is chosen."
)

ELSEWHERE = (
    "The run was deterministic: a row is the same in every batch, but not with another processor, number of threads or "
    "version of PyTorch."
)


def verify_job(out: Path, rows: int, seed: int, changes: Mapping[str, Any]) -> bool:
    """Replay random finished rows of `out`, each alone, and print how each compares. Returns whether all are equal.

    Args:
        out: a finished results file.
        rows: most rows to replay.
        seed: seed of the choice of rows.
        changes: options (and `inputs`) that replace the recorded ones, for files that were moved.

    Raises:
        InputError: the output or its inputs are missing, or an input has changed.
        FingerprintError: the model or a logit processor is not the one of the run.
        UsageError: a logit processor of the run, or the library that computed its attention, must be named again.
    """
    results = finished_results(out)
    run = results.footer
    assert run is not None
    if is_merged(run):
        raise InputError(f"{out} was merged from the outputs of several jobs. Verify those outputs, one by one.")
    config = RunConfig.restore(run["configuration"], out, changes)
    clock = run.get("clock") or config.engine.clock  # the rows are rendered with the time that the job saw
    config = replace(config, engine=replace(config.engine, max_num_seqs=1, clock=clock))
    files = found_inputs(config, run, "verify")
    inputs = same_inputs(files, run, "verify")
    processors = load_processors(config.engine.logit_processor)
    _check_processors(processors, run["logit_processors"])
    _check_library(config.engine.flash_library, run)
    model = check_engine_model(config.engine)
    job = CheckedJob(config, model, files, processors, model.hashes())
    setup = prepare(job, lambda note: None)
    _check_model(setup, run)
    chosen = choose_rows(out, rows, seed)
    same = 0
    for row, name, verdict in _replays(inputs, setup, results, chosen, scaled=run.get("scaled_positions", True)):
        same += verdict == _SAME
        print(printable(f"row {row} (id {name!r}): {verdict}"))
    print(f"{same:,} of {len(chosen):,} rows are the same")
    if same < len(chosen):
        print(ELSEWHERE if run["deterministic"] else ROUNDING)
    sys.stdout.flush()
    return same == len(chosen)


def _check_processors(named: Mapping[str, LoadedProcessor], recorded: Mapping[str, Any]) -> None:
    """Check that the logit processors of the run are named again and unchanged.

    Raises:
        UsageError: one is missing, or cannot be imported.
        FingerprintError: one has changed.
    """
    for name, (source, digest) in recorded.items():
        if name not in named:
            message = (
                "the run had logit processors, which are code and not loaded from a file's record. Name them again:"
            )
            raise UsageError(f"{message} --logit-processor {name}={source}")
        if named[name].digest != digest:
            raise FingerprintError(f"the logit processor {name} ({source}) has changed since the run")


def _check_library(library: str | None, run: Mapping[str, Any]) -> None:
    """Check that the attention library of the run is named again, if it computed the attention.

    Raises:
        UsageError: no library is named.
    """
    path = run["configuration"]["options"].get("flash_library", {}).get("value")
    if library is None and path is not None and f" of {path}" in str(run.get("kernels")):
        message = "the run used an attention library, which is code and not loaded from a file's record. Name it again:"
        raise UsageError(f"{message} --flash-library {path}")


def _check_model(setup: Setup, run: Mapping[str, Any]) -> None:
    now = setup.identity
    if "weights" not in run:
        raise FingerprintError(
            "the output was written by a version that did not hash all weights, so it is not known whether "
            f"{setup.front_end.name} is the model of the run. Compute the output again."
        )
    was = {"eos_ids": now["eos_ids"], **run}  # outputs of older versions do not record them
    differing = [name for name in _MODEL_FACTS if now.get(name) != was.get(name)]
    if differing:
        raise FingerprintError(
            f"{setup.front_end.name} is not the model of the run (different: {', '.join(differing)}). Name the right "
            "one with --model."
        )


def _replays(
    inputs: InputSet, setup: Setup, results: Results, chosen: list[int], *, scaled: bool
) -> Iterator[tuple[int, str, str]]:
    """(index, id in the output, verdict) of each chosen row."""
    engine = setup.load_engine()
    for raw in inputs.rows_at(chosen, setup.columns):
        recorded = list(results.rows(row=raw.index))
        yield raw.index, recorded[0]["id"], _replay(engine, setup, raw, recorded, scaled=scaled)


def _replay(engine: Engine, setup: Setup, raw: RawRow, recorded: list[dict[str, Any]], *, scaled: bool) -> str:
    """The verdict on a row that is computed again as a separate job.

    It has the id of the output, as the seeds of its samples depend on that.
    """
    row_id = recorded[0]["id"]
    table = RequestTable(EmbedsStore(setup.spec.embeds_size))
    reader = setup.front_end.row_reader(table, setup.defaults, "allow")
    (processed,) = reader.read([raw._replace(value=_with_id(raw.value or {}, row_id), error=None)])
    if processed.error is not None:
        return f"differs: the row is invalid now: {processed.error.message}"
    done = [completion for group in engine.start(table, scaled=scaled).loop.run() for completion in group]
    failed = next((completion.error for completion in done if completion.error is not None), None)
    if failed is not None:
        return f"differs: the row fails now: {failed.message}"
    done.sort(key=lambda completion: completion.key)
    asked = asked_columns(params.task for params in table.params)
    replayed = completions_to_table([OutputRow(completion, row_id) for completion in done], asked).to_pylist()
    return _verdict(compare(recorded, replayed))


def _with_id(value: Mapping[str, Any], row_id: str) -> dict[str, Any]:
    """The row with the id that the output has for it, which `--on-duplicate-id suffix` may have changed."""
    name = next((key for key in ID_NAMES if value.get(key) is not None), ID_NAMES[0])
    return {**value, name: row_id}


def _verdict(difference: Difference | None) -> str:
    if difference is None:
        return _SAME
    parts = []
    if difference.position is not None and difference.sample is not None:
        recorded, replayed = ("the end" if token is None else str(token) for token in difference.tokens)
        where = f"prompt {difference.sample[0]}, sample {difference.sample[1]}, token {difference.position}"
        parts.append(f"from {where} on (recorded {recorded}, replayed {replayed})")
    if difference.logprob:
        parts.append(f"logprobs by at most {difference.logprob:.3g}")
    return f"differs: {'; '.join(parts) or 'equal tokens'} (columns {', '.join(difference.columns)})"
