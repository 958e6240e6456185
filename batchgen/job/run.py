"""`batchgen run`: files in, one Parquet file out, resumable at every moment."""

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

from batchgen.config import RunConfig
from batchgen.data.committed import Committed
from batchgen.data.files import read_footer
from batchgen.data.finish import finish
from batchgen.data.own import own_files
from batchgen.data.parts import PartWriter, WriterStats
from batchgen.data.read import InputSet, open_inputs
from batchgen.data.retry import open_for_retry
from batchgen.data.schema import OutputRow
from batchgen.data.totals import read_totals
from batchgen.data.work import WorkFolder, open_work, output_paths
from batchgen.embeds import EmbedsStore
from batchgen.engine.collector import QuietCollector
from batchgen.engine.engine import Engine, Running
from batchgen.engine.intake import Intake
from batchgen.errors import InputError, ModelError, TooManyErrors, UsageError
from batchgen.job.estimate import estimate_output
from batchgen.job.events import EventWriter, open_events
from batchgen.job.identity import JobIdentity, identify
from batchgen.job.ingest import Ingested, ingest
from batchgen.job.progress import Phase, Progress, ProgressState, make_progress
from batchgen.job.reading import forget_reading, keep_reading, kept_reading, reading_key, report_bad
from batchgen.job.setup import Setup, prepare
from batchgen.job.signals import StopRequest
from batchgen.job.summary import RunSummary
from batchgen.models.base import Model, ModelSpec
from batchgen.request import Completion, RequestTable

__all__ = ["run_job"]


def run_job(config: RunConfig, stop: StopRequest) -> RunSummary:
    """Run a job to its end, or to where `stop` says that it is to stop.

    Raises:
        BatchgenError: whatever ends a job early; everything finished is committed first.
    """
    with make_progress(config.progress) as progress, QuietCollector(every=1) as collector:
        return _Job(config, stop, progress, collector).run()


class _Job:
    """One run of one job, phase by phase."""

    def __init__(self, config: RunConfig, stop: StopRequest, progress: Progress, collector: QuietCollector) -> None:
        self.config = config
        self.stop = stop
        self.progress = progress
        self.collector = collector
        self.seconds: dict[str, float] = {}
        self.state = ProgressState("starting")
        self.result = config.output
        """The file of results; of a shard that in the folder."""
        self.errors_before = 0
        """Rows that failed while an earlier run generated."""
        self.failed: set[int] = set()
        """Those, and the rows that failed while this one does: a row counts once, however many of its prompts fail."""
        self.generated = False
        """Whether there is any result but that rows are wrong."""
        self.rows_done = 0
        """Rows of which every prompt is done, those that were refused or skipped included."""
        self.left: dict[int, int] = {}
        """Row of several prompts -> those that are not done."""
        self.output_seconds = 0.0
        """What the steps waited for, while finished rows were given their texts and handed to the writer."""

    def run(self) -> RunSummary:
        """Everything from the command line to the finished file."""
        with self._phase("starting"):  # what any job pays, however few its rows
            setup = prepare(self.config, self.progress.note)
            inputs = open_inputs(self.config.inputs, own_files(self.config))
            identity = identify(self.config, inputs, setup.identity, setup.sampling)
            paths = output_paths(self.config.output, identity.run.shard)
            self.result = paths.result
            open_output = open_for_retry if self.config.retry_errors else open_work
            work = open_output(paths, identity.run, identity.info, self.config.existing)
        if work is None:
            return _finished(paths.result, identity)
        self.collector.set_aside()
        with work, ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
            # The weights are read while the rows are tokenised.
            model = loader.submit(setup.load_model)
            with self._phase("reading"):
                committed = Committed.read(work, retry_errors=self.config.retry_errors)
            try:
                return self._fill(work, committed, inputs, identity, setup, model)
            except (UsageError, InputError, ModelError):
                if not len(committed) and not self.generated:
                    # Refused before a token was computed: a corrected command finds no other work. What was committed
                    # says which rows are wrong, which the next reading finds again.
                    work.remove()
                raise

    def _fill(
        self,
        work: WorkFolder,
        committed: Committed,
        inputs: InputSet,
        identity: JobIdentity,
        setup: Setup,
        model: Future[Model],
    ) -> RunSummary:
        """Commit what is missing, then gather everything into the output."""
        config = self.config
        with (
            self._events(len(committed) > 0) as events,
            PartWriter(work, config.commit_every, config.commit_seconds, max_bytes=config.max_output_bytes) as writer,
        ):
            self.stop.commit = writer.flush
            with self._phase("reading"):
                rows = self._rows(work, identity, inputs, setup, committed, writer)
            self._hold_size(rows, setup.spec)
            setup.note_unread(rows.table.params, self.progress.note)
            done = committed.contains(rows.table.row_index, rows.table.prompt_index)
            self._count(rows, done)
            with self._phase("loading"):
                loaded = self._await(model, rows)
                engine = Engine.from_parts(self.config.engine, loaded, setup.tokenizer, setup.encoder.grammars)
            with self._phase("planning"):
                emit = events.listener(lambda row: rows.texts[row][0]) if events is not None else None
                running = engine.start(rows.table, done, prompt_ids=self.config.include_prompt_ids, emit=emit)
                if setup.spec.device.type != "cpu" or engine.backend is None or engine.backend.name != "torch":
                    self.progress.note(f"kernels: {engine.kernels}")
            with self._phase("generating"):
                self._generate(running, rows, writer)
            if running.loop.graphs is not None and running.loop.graphs.refused is not None:
                self.progress.note(f"no CUDA graphs: {running.loop.graphs.refused}")
        if self.stop.requested:
            raise self.stop.error(self.state.rows_done, rows.rows)
        self._hold_threshold(rows)
        rows.close(keep=True)  # for a run that goes on where this one is cut short while it gathers
        with self._phase("writing"):
            made = {
                "kernels": engine.kernels,
                "input_rows": rows.rows,
                "rows_skipped": rows.skipped,
                "row_shapes": rows.shapes.encode(),
                "created": int(time.time()),
                "layer_ids": [*setup.spec.moe_layers] or None,
                "experts_per_token": setup.spec.experts_per_token or None,
            }
            finish(work, rows.expected, {**identity.record, **made}, max_bytes=config.max_output_bytes)
        return self._summary(work.paths.result, identity, rows, committed, running, writer.stats)

    def _events(self, go_on: bool) -> EventWriter | nullcontext[None]:
        """Where events go; opened before anything is computed, so that a path that cannot be written is no surprise."""
        return nullcontext() if self.config.events is None else open_events(self.config.events, go_on=go_on)

    def _rows(
        self,
        work: WorkFolder,
        identity: JobIdentity,
        inputs: InputSet,
        setup: Setup,
        committed: Committed,
        writer: PartWriter,
    ) -> Ingested:
        """All rows tokenised: as an earlier run of this job left them, or read now and left for a later one."""

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

        # Those that cannot be parsed are found again.
        self.failed = set(np.unique(committed.row_index[committed.is_error]).tolist())
        key = reading_key(identity, self.config, setup)
        rows = _kept(work, key, committed, setup)
        if rows is None:
            forget_reading(work.reading)
            table = RequestTable(EmbedsStore(setup.spec.embeds_size, work.scratch))
            intake = Intake(table, setup.encoder, setup.defaults, self.config.on_duplicate_id, setup.media_root)
            rows = ingest(self.config, inputs, intake, table, work.reading, setup.decode_prompt, on_row)
            keep_reading(rows, work.reading, key)
        setup.encoder.grammars.release()
        # Before a row of this job is committed: those of another would never fit beside it.
        rows.expected.hold(committed, work.paths.work)
        report_bad(rows, on_error)
        self.errors_before = len(self.failed)
        self._report(rows_done=0, rows_total=rows.rows, rows_error=self._errors(rows))
        self._hold_threshold(rows)
        return rows

    def _hold_size(self, rows: Ingested, spec: ModelSpec) -> None:
        """Refuse to start what may exceed `--max-output-bytes`."""
        estimate_output(rows, self.config, spec).hold(self.config.max_output_bytes)

    def _await(self, model: Future[Model], rows: Ingested) -> Model:
        """The model once it is loaded; meanwhile a request to stop is heard."""
        while not wait([model], timeout=0.1).done:
            if self.stop.requested:
                raise self.stop.error(self.rows_done, rows.rows)
        return model.result()

    def _count(self, rows: Ingested, done: npt.NDArray[np.bool_]) -> None:
        """Where the count of rows begins; `done` [requests] says which of the table are.

        A prompt counts once, however many texts are scored behind it: it comes as one group.
        """
        row, prompt = rows.table.row_index[~done], rows.table.prompt_index[~done]
        first = np.ones(len(row), np.bool_)
        first[1:] = (row[1:] != row[:-1]) | (prompt[1:] != prompt[:-1])
        begun, prompts = np.unique(row[first], return_counts=True)
        several = prompts > 1
        self.left = dict(zip(begun[several].tolist(), prompts[several].tolist(), strict=True))
        self.rows_done = rows.rows - len(begun)

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
                self._hold_threshold(rows)
            if left := self.left.pop(first.row_index, 1) - 1:
                self.left[first.row_index] = left
            else:
                self.rows_done += 1
        self._report(rows_done=self.rows_done)

    def _tick(self, running: Running) -> bool:
        """Between two steps: report, and ask whether to stop."""
        now = running.loop.state
        self._report(
            rows_done=self.rows_done,
            completion_tokens=now.output_tokens,
            running=now.running,
            waiting=max(0, (self.state.rows_total or 0) - self.rows_done - now.running),
            kv_use=now.kv_pages_used / max(1, now.kv_pages),
        )
        return self.stop.requested

    def _output(self, completion: Completion, rows: Ingested) -> OutputRow:
        row_id, extra, prompts = rows.texts[completion.row_index]
        return OutputRow(completion, row_id, extra, prompts[completion.prompt_index] if prompts else None)

    def _errors(self, rows: Ingested) -> int:
        """Rows that failed so far."""
        return rows.errors.total() + self.errors_before

    def _hold_threshold(self, rows: Ingested) -> None:
        errors = self._errors(rows)
        if self.config.max_errors.exceeded(errors, rows.rows - rows.skipped):
            codes = ", ".join(f"{code} {count:,}" for code, count in rows.errors.most_common())
            if self.errors_before:
                codes = ", ".join(filter(None, (codes, f"in an earlier run {self.errors_before:,}")))
            raise TooManyErrors(
                f"{errors:,} of {rows.rows:,} rows failed ({codes}), more than --max-errors allows "
                f"({self.config.max_errors}). See them with: batchgen show {quote(str(self.result))} --errors. "
                "With a higher --max-errors the same command goes on."
            )

    def _report(self, **changes: float | int | None) -> None:
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
            computed_prompt_tokens=stats.prompt_tokens + stats.relogit_tokens,
            cached_tokens=totals.cached_tokens,
            completion_tokens=totals.completion_tokens,
            dropped_tokens=totals.dropped_tokens,
            kv_peak_bytes=stats.peak_pages * running.page_bytes,
            seconds={phase: round(spent, 3) for phase, spent in self.seconds.items()},
            output_tokens_per_second=running.loop.state.output_tokens / generating if generating else 0.0,
            engine={
                **stats.as_dict(),
                **asdict(written),
                "output_milliseconds": round(1e3 * self.output_seconds),
                **running.loop.counts(),
            },
        )


def _kept(work: WorkFolder, key: str, committed: Committed, setup: Setup) -> Ingested | None:
    """The rows as an earlier run left them; None where there are none, or a constraint does not compile any more."""
    rows = kept_reading(work.reading, key)
    if rows is None:
        return None
    done = committed.contains(rows.table.row_index, rows.table.prompt_index)
    if setup.encoder.can_compile(rows.table.constraints(done)):
        return rows
    rows.close()
    return None


def _finished(result: Path, identity: JobIdentity) -> RunSummary:
    """The summary of an output that was complete before."""
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
