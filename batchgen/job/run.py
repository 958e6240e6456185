"""`batchgen run`: one resumable run of a job, from input files to one Parquet file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

import numpy as np
import numpy.typing as npt

from batchgen.data.read.input_set import InputSet, open_inputs
from batchgen.data.view import read_totals
from batchgen.data.write.committed import Committed, first_of_prompt
from batchgen.data.write.durable_files import read_footer
from batchgen.data.write.finish import finish
from batchgen.data.write.parts import PartWriter, WriterStats
from batchgen.data.write.retry import open_for_retry
from batchgen.data.write.schema import OutputRow
from batchgen.data.write.work_folder import WorkFolder, open_work, output_paths
from batchgen.engine.engine import Running
from batchgen.engine.gc_control import DeferredGC
from batchgen.errors import InputError, ModelError, TooManyErrors, UsageError
from batchgen.job.estimate import estimate_output
from batchgen.job.eta import EtaTracker
from batchgen.job.events import EventWriter, open_events
from batchgen.job.fingerprint import JobIdentity, identify_job
from batchgen.job.ingest import Ingested, ingest
from batchgen.job.preflight import CheckedJob
from batchgen.job.progress import DONE, Phase, Progress, ProgressState, TimeLeft, make_progress
from batchgen.job.setup import Setup, prepare
from batchgen.job.signals import StopRequest
from batchgen.job.summary import RunSummary
from batchgen.job.tokenized_cache import (
    discard_tokenized,
    load_tokenized,
    report_bad_rows,
    save_tokenized,
    tokenized_key,
)
from batchgen.models.base import Model
from batchgen.request.completion import Completion


def run_job(job: CheckedJob, stop: StopRequest) -> RunSummary:
    """Run a job to its end, or until `stop` requests a stop.

    Raises:
        BatchgenError: the job ended early; all finished rows are committed.
    """
    with make_progress(job.config.progress) as progress, DeferredGC(every=1) as collector:
        return _Job(job, stop, progress, collector).run()


class _Job:
    """One run of one job: the phases and the state they share."""

    def __init__(self, job: CheckedJob, stop: StopRequest, progress: Progress, collector: DeferredGC) -> None:
        self.job = job
        self.config = job.config
        self.stop = stop
        self.progress = progress
        self.collector = collector
        self.seconds: dict[str, float] = {}
        self.state = ProgressState("starting")
        self.result = job.config.output
        """Path of the results file; for a shard, its file in the output folder."""
        self.errors_before = 0
        """Number of rows that failed in earlier runs while generating."""
        self.failed: set[int] = set()
        """Indexes of rows that failed while generating, in this run or earlier ones; each counts as one error."""
        self.generated = False
        """Whether this run has generated any result. Errors of invalid rows do not count."""
        self.rows_done = 0
        """Number of rows of which every prompt is done, invalid and skipped rows included."""
        self.prompts_left: dict[int, int] = {}
        """Row index -> number of its unfinished prompts, for rows with several."""
        self.eta: EtaTracker | None = None
        """Estimates the time left while rows are generated, if that is shown."""
        self.output_seconds = 0.0
        """Seconds that the loop spent on passing finished rows to the writer."""

    def run(self) -> RunSummary:
        """Run the job and return its summary."""
        with self._phase("starting"):  # the cost of a job of any size
            setup = prepare(self.job, self.progress.note)
            inputs = open_inputs(self.job.inputs)
            identity = identify_job(setup, inputs)
            paths = output_paths(self.config.output, identity.run.shard)
            self.result = paths.result
            open_output = open_for_retry if self.config.retry_errors else open_work
            work = open_output(paths, identity.run, identity.info, self.config.existing)
        if work is None:
            return _finished(paths.result, identity)
        self.collector.freeze_all()
        with work, ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
            # Weights are loaded while the rows are tokenised.
            model = loader.submit(setup.load_model)
            with self._phase("reading"):
                committed = Committed.read(work, retry_errors=self.config.retry_errors)
            try:
                return self._complete(work, committed, inputs, identity, setup, model)
            except (UsageError, InputError, ModelError):
                if not len(committed) and not self.generated:
                    # Refused before a token was computed: remove the work folder, so that a corrected command is not
                    # refused for it. Committed errors of invalid rows are found again by the next run.
                    work.remove()
                raise

    def _complete(
        self,
        work: WorkFolder,
        committed: Committed,
        inputs: InputSet,
        identity: JobIdentity,
        setup: Setup,
        model: Future[Model],
    ) -> RunSummary:
        """Compute and commit the missing rows, then merge all committed rows into the output."""
        config = self.config
        with (
            self._events(len(committed) > 0) as events,
            PartWriter(work, config.commit_every, config.commit_seconds, max_bytes=config.max_output_bytes) as writer,
        ):
            self.stop.commit = writer.flush
            with self._phase("reading"):
                rows = self._rows(work, identity, inputs, setup, committed, writer)
            estimate_output(rows, config, setup.spec).check(config.max_output_bytes)
            setup.note_unused_options(rows.table.params, self.progress.note)
            done = committed.contains(rows.table.row_index, rows.table.prompt_index)
            self._init_row_counts(rows, done)
            with self._phase("loading"):
                loaded = self._wait_for_model(model, rows)
                engine = setup.engine(loaded)
            with self._phase("planning"):
                emit = events.listener(lambda row: rows.texts[row][0]) if events is not None else None
                running = engine.start(rows.table, done, prompt_ids=self.config.include_prompt_ids, emit=emit)
                if setup.spec.device.type != "cpu" or engine.backend is None or engine.backend.name != "torch":
                    self.progress.note(f"kernels: {engine.kernels}")
            if self.progress.shows_time_left:
                self.eta = EtaTracker.of_job(running, setup.spec)
            with self._phase("generating"):
                self._generate(running, rows, writer)
            for note in running.loop.notes:
                self.progress.note(note)
        if self.stop.requested:
            raise self.stop.error(self.state.rows_done, rows.rows)
        self._check_max_errors(rows)
        rows.close(keep=True)  # for a run that resumes if this one is interrupted while writing
        with self._phase("writing"):
            record = {
                "kernels": engine.kernels,
                "input_rows": rows.rows,
                "rows_skipped": rows.skipped,
                "row_shapes": rows.shapes.encode(),
                "created": int(time.time()),
                "layer_ids": [*setup.spec.moe_layers] or None,
                "experts_per_token": setup.spec.experts_per_token or None,
            }
            finish(work, rows.expected, {**identity.record, **record}, max_bytes=config.max_output_bytes)
        return self._summary(work.paths.result, identity, rows, committed, running, writer.stats)

    def _events(self, resumed: bool) -> EventWriter | nullcontext[None]:
        """The event writer, if `--events` is given; opened before the computation, so that a bad path fails early."""
        return nullcontext() if self.config.events is None else open_events(self.config.events, append=resumed)

    def _rows(
        self,
        work: WorkFolder,
        identity: JobIdentity,
        inputs: InputSet,
        setup: Setup,
        committed: Committed,
        writer: PartWriter,
    ) -> Ingested:
        """All rows tokenised: from the cache of an earlier run, or read now and cached for a later run."""

        def on_error(completion: Completion, row_id: str, extra: str | None) -> None:
            if (completion.row_index, 0) not in committed:
                writer.add([OutputRow(completion, row_id, extra)])
            else:
                self.failed.discard(completion.row_index)

        def on_row(rows: int) -> None:
            if not rows % 256:
                self.collector.tick()
                self._report(rows_done=rows)
                if self.stop.requested:
                    raise self.stop.error(committed.rows)

        # Rows that fail in parsing are found again: `on_error` removes them.
        self.failed = set(np.unique(committed.row_index[committed.is_error]).tolist())
        key = tokenized_key(identity, setup)
        rows = _load_rows(work, key, committed, setup)
        if rows is None:
            discard_tokenized(work.tokenized)
            rows = ingest(setup, inputs, work.tokenized, work.scratch, on_row)
            save_tokenized(rows, work.tokenized, key)
        setup.front_end.grammars.release()
        # Before a row of this job is committed: the work of a different job could never be completed together with it.
        rows.expected.check_resumable(committed, work.paths.work)
        report_bad_rows(rows, on_error)
        self.errors_before = len(self.failed)
        self._report(rows_done=0, rows_total=rows.rows, rows_error=self._errors(rows))
        self._check_max_errors(rows)
        return rows

    def _wait_for_model(self, model: Future[Model], rows: Ingested) -> Model:
        """The loaded model; a stop request is handled while waiting."""
        while not wait([model], timeout=0.1).done:
            if self.stop.requested:
                raise self.stop.error(self.rows_done, rows.rows)
        return model.result()

    def _init_row_counts(self, rows: Ingested, done: npt.NDArray[np.bool_]) -> None:
        """Set `rows_done` and `prompts_left`, given `done` [N]: whether each request of the table is committed.

        A prompt counts once, however many texts are scored with it: its completions arrive as one group.
        """
        row, prompt = rows.table.row_index[~done], rows.table.prompt_index[~done]
        unfinished, prompts = np.unique(row[first_of_prompt(row, prompt)], return_counts=True)
        several = prompts > 1
        self.prompts_left = dict(zip(unfinished[several].tolist(), prompts[several].tolist(), strict=True))
        self.rows_done = rows.rows - len(unfinished)

    def _generate(self, running: Running, rows: Ingested, writer: PartWriter) -> None:
        for group in running.loop.run(lambda: self._tick(running)):
            began = time.perf_counter()
            self.generated = True
            writer.add([self._output(c, rows) for c in group])
            self.output_seconds += time.perf_counter() - began
            first = group[0]
            if first.error is not None and first.row_index not in self.failed:
                self.failed.add(first.row_index)
                rows.errors[first.error.code] += 1
                self._report(rows_error=self._errors(rows))
                self._check_max_errors(rows)
            if left := self.prompts_left.pop(first.row_index, 1) - 1:
                self.prompts_left[first.row_index] = left
            else:
                self.rows_done += 1
        self._report(rows_done=self.rows_done, left=self.state.left if self.stop.requested else DONE)

    def _tick(self, running: Running) -> bool:
        """Between two steps: report progress and return whether to stop."""
        state = running.loop.state
        self._report(
            rows_done=self.rows_done,
            completion_tokens=state.output_tokens,
            running=state.running,
            waiting=max(0, (self.state.rows_total or 0) - self.rows_done - state.running),
            kv_use=state.kv_pages_used / max(1, state.kv_pages),
            left=None if self.eta is None else self.eta.tick(state.in_flight),
        )
        return self.stop.requested

    def _output(self, completion: Completion, rows: Ingested) -> OutputRow:
        row_id, extra, prompts = rows.texts[completion.row_index]
        return OutputRow(completion, row_id, extra, prompts[completion.prompt_index] if prompts else None)

    def _errors(self, rows: Ingested) -> int:
        """Number of rows that failed so far."""
        return rows.errors.total() + self.errors_before

    def _check_max_errors(self, rows: Ingested) -> None:
        errors = self._errors(rows)
        if self.config.max_errors.exceeded(errors, rows.rows - rows.skipped):
            codes = ", ".join(f"{code} {count:,}" for code, count in rows.errors.most_common())
            if self.errors_before:
                codes = ", ".join(filter(None, (codes, f"in earlier runs {self.errors_before:,}")))
            raise TooManyErrors(
                f"{errors:,} of {rows.rows:,} rows failed ({codes}), more than --max-errors allows "
                f"({self.config.max_errors}). See them with: batchgen show {quote(str(self.result))} --errors. "
                "To continue, raise --max-errors and run the same command again."
            )

    def _report(self, **changes: float | TimeLeft | None) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self.progress.update(self.state)

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        self.state = replace(self.state, phase=phase)
        self.progress.update(self.state)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def _summary(
        self,
        result: Path,
        identity: JobIdentity,
        rows: Ingested,
        committed: Committed,
        running: Running,
        written: WriterStats,
    ) -> RunSummary:
        totals = read_totals(result)
        stats = running.scheduler.stats
        generating = self.seconds["generating"]
        return RunSummary(
            output=str(result),
            rows=rows.rows,
            rows_ok=totals.rows - totals.rows_error,
            rows_error=totals.rows_error,
            fingerprint=identity.run.fingerprint,
            errors=dict(totals.errors),
            rows_skipped=rows.skipped,
            rows_resumed=len(np.unique(committed.row_index)),
            prompt_tokens=running.workload.tree.prompt_tokens,
            distinct_prompt_tokens=running.workload.tree.distinct_tokens,
            computed_prompt_tokens=stats.prompt_tokens + stats.recomputed_last_tokens,
            cached_tokens=totals.cached_tokens,
            completion_tokens=totals.completion_tokens,
            dropped_tokens=totals.dropped_tokens,
            kv_peak_bytes=stats.peak_pages * running.page_bytes,
            seconds={phase: round(spent, 3) for phase, spent in self.seconds.items()},
            output_tokens_per_second=running.loop.state.output_tokens / generating if generating else 0.0,
            engine={
                **stats.as_dict(),
                **asdict(written),
                "output_ms": round(1e3 * self.output_seconds),
                **running.loop.counts(),
            },
        )


def _load_rows(work: WorkFolder, key: str, committed: Committed, setup: Setup) -> Ingested | None:
    """The rows tokenised by an earlier run; None if there is no valid cache or a constraint cannot be compiled now."""
    rows = load_tokenized(work.tokenized, key)
    if rows is None:
        return None
    done = committed.contains(rows.table.row_index, rows.table.prompt_index)
    if setup.front_end.encoder.can_compile(rows.table.constraints(done)):
        return rows
    rows.close()
    return None


def _finished(result: Path, identity: JobIdentity) -> RunSummary:
    """The summary of an output that was already complete."""
    totals = read_totals(result)
    footer = read_footer(result) or {}
    return RunSummary(
        output=str(result),
        rows=int(footer.get("input_rows") or totals.rows),
        rows_ok=totals.rows - totals.rows_error,
        rows_error=totals.rows_error,
        fingerprint=identity.run.fingerprint,
        errors=dict(totals.errors),
        rows_skipped=int(footer.get("rows_skipped") or 0),
        cached_tokens=totals.cached_tokens,
        completion_tokens=totals.completion_tokens,
        dropped_tokens=totals.dropped_tokens,
        already_done=True,
    )
