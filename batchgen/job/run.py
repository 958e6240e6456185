"""`batchgen run`: one resumable run of a job, from input files to one Parquet file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

import numpy as np
import numpy.typing as npt

from batchgen.config.urls import path_of
from batchgen.data.feature_files import FeatureFiles
from batchgen.data.files import exists
from batchgen.data.schema import ASKED, OutputRow, asked_columns, results_schema
from batchgen.data.store.committed import Committed, first_of_prompt
from batchgen.data.store.parts import PartWriter
from batchgen.data.store.timeline import Timeline
from batchgen.data.store.work_folder import WorkFolder, output_paths
from batchgen.data.store.work_parts import PartsCopy, has_results, parts_copy
from batchgen.engine.advice import output_advice
from batchgen.engine.engine import Engine
from batchgen.engine.loop import LoopState
from batchgen.engine.memory.gc_control import DeferredGC
from batchgen.engine.outputs.streaming import Emit
from batchgen.engine.running import Running
from batchgen.errors import InputError, ModelError, TooManyErrors, UsageError
from batchgen.job.display.eta import EtaTracker
from batchgen.job.display.media_figures import media_facts, media_figures
from batchgen.job.display.progress import DONE, Phase, Progress, ProgressState, TimeLeft
from batchgen.job.display.reasons import Reasons
from batchgen.job.estimate import estimate_output
from batchgen.job.events import open_events
from batchgen.job.finished import OpenedCommand
from batchgen.job.generation import Generation, OneEngine
from batchgen.job.in_work import InWork
from batchgen.job.output import OpenedJob, write_output
from batchgen.job.preflight import wait_for_hashes
from batchgen.job.rows.fingerprint import identify_job
from batchgen.job.rows.ingest import Ingested, ingest
from batchgen.job.rows.request_hashes import RequestHashes, output_rows
from batchgen.job.rows.reuse import Reuse, find_reuse, reusable_files
from batchgen.job.rows.tokenized_cache import (
    discard_tokenized,
    load_rows,
    report_bad_rows,
    save_tokenized,
    tokenized_key,
)
from batchgen.job.scale.replicas import Replicas
from batchgen.job.scale.workers import workers_of
from batchgen.job.setup import Setup, prepare
from batchgen.job.signals import StopRequest
from batchgen.job.summary import RunSummary, run_summary
from batchgen.kernels.cpu.library import COMPILING
from batchgen.request.completion import Completion
from batchgen.request.rows.unknown_keys import MAX_NOTES, carried_notes, note_line


def run_job(command: OpenedCommand, stop: StopRequest, progress: Progress, began: float) -> RunSummary:
    """Run a job to its end.

    Args:
        command: the checked job with its inputs.
        stop: ends the run when it requests a stop.
        progress: the display, to which the job reports its state.
        began: when the command began, by `time.monotonic`.

    Raises:
        BatchgenError: the job ended early; all finished rows are committed.
    """
    with DeferredGC(every=1) as collector:
        return _Job(command, stop, progress, collector, began).run()


class _Job:
    """One run of one job: the phases and the state they share."""

    def __init__(
        self, command: OpenedCommand, stop: StopRequest, progress: Progress, collector: DeferredGC, began: float
    ) -> None:
        self.command = command
        self.loaded: tuple[Setup, Engine] | None = command.loaded
        self.job = command.job
        self.config = command.job.config
        self.stop = stop
        self.progress = progress
        self.collector = collector
        self.seconds: dict[str, float] = {"starting": time.monotonic() - began}
        self.state = ProgressState("starting")
        self.result = self.config.output
        """Path of the results file; for a shard, its file in the output folder."""
        self.committed_at = self.config.output
        """Where `show` finds the committed rows."""
        self.errors_before = 0
        """Number of rows that failed in earlier runs while generating."""
        self.failed: set[int] = set()
        """Indexes of rows that failed while generating, in this run or earlier ones; each counts as one error."""
        self.reasons = Reasons()
        """Why rows failed, in this run or while it read them."""
        self.nothing_valid = False
        """Whether every row of the input is invalid, and there is no earlier output to compare it with."""
        self.generated = False
        """Whether this run has generated any result. Errors of invalid rows do not count."""
        self.rows_done = 0
        """Number of rows of which every prompt is done, invalid and skipped rows included."""
        self.prompts_left: dict[int, int] = {}
        """Row index -> number of its unfinished prompts, for rows with several."""
        self.opened = ExitStack()
        """Closes the files of the tokenised rows, which are kept for a run that resumes."""
        self.loading: Future[Engine] | None = None
        """The engine, while its weights are loaded."""
        self.replicas: Replicas | None = None
        """The processes that generate, if there are several."""
        self.output_seconds = 0.0
        """Seconds that the loop spent on passing finished rows to the writer."""

    def run(self) -> RunSummary:
        """Run the job and return its summary."""
        with self._phase("starting"):  # the cost of a job of any size
            setup = self._prepared()
            wait_for_hashes(self.job.hashes, self.progress.note, self.stop)
            identity = identify_job(setup, self.command.inputs)
            paths = output_paths(self.config.output, identity.run.shard, self.config.work_path)
            self.result = paths.result
            self.committed_at = paths.result if self.config.work_dir is None else paths.work
            job = OpenedJob(setup, self.command.inputs, identity, paths, self.progress.note)
            job.refuse_named()
            if self.loaded is None:
                self.command.keep(identity.run.fingerprint)
            copy = parts_copy(self.config.copies, paths.work)
            if copy is not None and self.config.existing != "overwrite":
                copy.fetch(self.progress.note)
            work = job.begin()
        if work is None:
            if copy is not None:
                copy.remove()
            return self.command.summary(paths.result, identity.run.fingerprint)
        self.collector.freeze_all()
        with work, ThreadPoolExecutor(1, thread_name_prefix="load") as loader, self.opened:
            self.in_work = self.opened.enter_context(InWork(work, retry_errors=self.config.retry_errors))
            self.timeline = work.timeline = Timeline(lambda: self.in_work.slowest)
            self.stop.abandon = self.in_work.close
            # Weights are loaded, and kernels compiled, while the rows are tokenised.
            workers = workers_of(setup, work)
            if self.loaded is not None:
                self.loading = loader.submit(lambda engine: engine, self.loaded[1])
            elif workers is not None:
                replicas = Replicas(setup, workers, work, self.in_work, self.progress.note)
                self.replicas = self.opened.enter_context(replicas)
            else:
                self.loading = loader.submit(setup.load_engine, lambda: not self.stop.requested)
            for path in work.foreign:
                what = "a link, a special file, a folder in the place of a file, or another user's"
                self.progress.note(f"{path} is {what}: it was set aside")
            with self._phase("reading"):
                committed = Committed.read(work, retry_errors=self.config.retry_errors)
            try:
                if copy is not None:
                    copy.sync()
                summary = self._complete(job, work, committed, copy)
                if copy is not None:
                    copy.remove()
                return summary
            except (UsageError, InputError, ModelError, TooManyErrors) as error:
                # Refused before a token was computed: remove the work folder. Committed errors of invalid rows are
                # found again by the next run. With too many of them, `show` lists them, unless no row is valid.
                kept = isinstance(error, TooManyErrors) and not self.nothing_valid
                if not kept and not self.generated and not has_results(work.paths.work):
                    work.remove()
                raise

    def _prepared(self) -> Setup:
        if self.loaded is not None:
            return self.loaded[0]
        elsewhere = self.config.ray is not None
        return prepare(self.job, self.progress.note, compiling=self._compiling, allow_missing_gpu=elsewhere)

    def _complete(self, job: OpenedJob, work: WorkFolder, committed: Committed, copy: PartsCopy | None) -> RunSummary:
        """Compute and commit the missing rows, then merge all committed rows into the output."""
        setup, record = job.setup, job.identity.record
        config = self.config  # a wrong --reuse fails before the rows are read
        files = reusable_files(work, None if config.reuse is None else path_of(config.reuse))
        resumed = len(committed) > 0 or bool(files)
        # Opened before the computation, so that a bad path fails early.
        opened = nullcontext() if config.events is None else open_events(config.events, append=resumed)
        with (
            opened as events,
            PartWriter(work, config.commit_every, config.commit_seconds, max_bytes=config.max_output_bytes) as writer,
        ):
            writer.copy = writer.copy if copy is None else copy.add
            writer.before_part = None if events is None else events.sync
            self.stop.commit = writer.flush
            with self._phase("reading"):
                rows = self._rows(job, work, committed, writer)
            estimate_output(rows, setup).check(config.max_output_bytes)
            setup.note_rows(rows.table, self.progress.note)
            with self._phase("reading"):
                hashes = RequestHashes(setup, rows.table)
                reuse = self._find_reuse(files, rows, hashes, committed)
            self._init_row_counts(rows, reuse.done)
            emit = None if events is None else events.listener(lambda row: rows.texts[row][0])
            running = self._begin(job, work, rows, reuse.done, emit, writer)
            with self._phase("planning"):
                reuse.commit(rows, running.workload, work, writer)
            with self._phase("generating"):
                self._generate(running, rows, hashes, writer)
            for note in running.notes:
                self.progress.note(note)
        if self.stop.requested:
            raise self.stop.error(self.state.rows_done, rows.rows)
        self._check_max_errors(rows)
        counts = running.counts
        media = media_figures(setup.media_plan(rows.table), counts.engine, setup.spec.device.type)
        advice, facts = rows.advice(setup), {**running.facts, **media_facts(media)}
        self.opened.close()
        del running  # frees the plan, before the keys of the whole output are in memory
        self.collector.collect()
        with self._phase("writing"):
            totals = write_output(work, rows, {**record, **facts}, setup)
        summary = run_summary(self.result, record, rows, totals, counts, self.seconds)
        return replace(
            summary,
            rows_resumed=committed.rows + reuse.rows,
            carried_options=carried_notes(rows.carried_options, config.carry),
            commonest_error=self.reasons.commonest(),
            prompt_of=lambda row, prompt: setup.prompt_text(rows.table, row, prompt),
            kernels=facts["kernels"],
            media=media,
            advice=[*advice, *output_advice(totals, rows.table)],
            engine={**summary.engine, "output_ms": round(1e3 * self.output_seconds), **asdict(writer.stats)},
        )

    def _begin(
        self,
        job: OpenedJob,
        work: WorkFolder,
        rows: Ingested,
        done: npt.NDArray[np.bool_],
        emit: Emit | None,
        writer: PartWriter,
    ) -> Generation:
        """Plan the job, on an engine in this process or on replicas. `done`: [N] requests that are finished."""
        setup, times = job.setup, self.progress.shows_time_left or self.config.report is not None
        scaled = setup.scales_positions(rows.table)
        if self.replicas is not None:
            with self._phase("planning"):
                key = tokenized_key(job.identity, setup, self.in_work.refused)
                once = any(each.is_pipe for each in self.job.inputs)
                self.replicas.begin(rows, key, done, emit=emit, scaled=scaled, times=times, once=once)
            return self.replicas
        with self._phase("loading"):
            engine = self._wait_for_engine(rows)
        with self._phase("planning"):
            ids = self.config.include_prompt_ids
            running = engine.start(rows.table, done, self.in_work, prompt_ids=ids, emit=emit, scaled=scaled)
            self._keep_features(running, work, setup, writer)
        return OneEngine(engine, running, EtaTracker.of_job(running, setup.spec) if times else None)

    def _keep_features(self, running: Running, work: WorkFolder, setup: Setup, writer: PartWriter) -> None:
        """Keep the features of images and sounds in the work folder while rows that are not committed need them."""
        media = running.media
        if media is None:
            return
        files = FeatureFiles(work.features, media.names(setup.features_key), self.progress.note)
        self.opened.callback(files.close)
        media.keep_in(files)
        writer.after_part = lambda rows: media.committed(row.completion.key[:2] for row in rows)

    def _find_reuse(self, files: Sequence[Path], rows: Ingested, hashes: RequestHashes, committed: Committed) -> Reuse:
        """The rows that earlier jobs have finished, with a line that says how many they are."""
        reuse = find_reuse(hashes, rows, committed, files)
        if files:
            left = rows.rows - committed.rows - reuse.rows
            self.progress.note(f"{reuse.rows:,} of {rows.rows:,} rows are reused, {left:,} are new, changed or failed")
        elif self.config.reuse is not None:
            self.progress.note(f"no row is reused: {self.config.reuse} does not hold another job's results")
        return reuse

    def _rows(self, job: OpenedJob, work: WorkFolder, committed: Committed, writer: PartWriter) -> Ingested:
        """All rows tokenised: from the cache of an earlier run, or read now and cached for a later run."""

        def on_error(completion: Completion, row_id: str, extra: str | None) -> None:
            completion = replace(completion, prompt_index=after.get(completion.row_index, 0))
            self.reasons.add(completion, row_id)
            if completion.key[:2] not in committed:
                writer.add([OutputRow(completion, row_id, extra)])
            else:
                self.failed.discard(completion.row_index)

        def on_row(rows: int) -> None:
            if not rows % 256:
                self.collector.tick()
                self._report(rows_done=rows)
                if self.stop.requested:
                    raise self.stop.error(committed.rows)

        setup = job.setup
        # Rows that fail in parsing are found again: `on_error` removes them.
        self.failed = set(np.unique(committed.row_index[committed.is_error]).tolist())
        key = tokenized_key(job.identity, setup, self.in_work.refused)
        rows = load_rows(work, key, committed, setup)
        if rows is None:
            discard_tokenized(work.tokenized)
            rows = ingest(setup, job.inputs, work.tokenized, work.scratch, on_row, self.in_work)
            save_tokenized(rows, work.tokenized, key)
        self.opened.callback(rows.close, keep=True)
        work.asked = asked_columns(params.task for params in rows.table.params)
        names = results_schema((), work.asked).names
        if missing := [name for name in self.config.columns or () if name in ASKED and name not in names]:
            raise UsageError(f"`--columns` {missing[0]}: no row of the job asks for it; leave it out")
        if self.loaded is None:
            setup.front_end.release()
        after = rows.expected.keep_committed(self.in_work.refused, committed)
        # Before a row of this job is committed: the work of a different job could never be completed together with it.
        rows.expected.check_resumable(committed, work.paths.work)
        report_bad_rows(rows, on_error)
        carried = carried_notes(rows.carried_options, self.config.carry)[:MAX_NOTES]
        for line in (*rows.notes, *map(note_line, carried)):
            self.progress.note(line)
        self.errors_before = len(self.failed)
        self._report(rows_done=0, rows_total=rows.rows, rows_error=self._errors(rows))
        self._check_max_errors(rows)
        return rows

    def _wait_for_engine(self, rows: Ingested) -> Engine:
        """The engine with its model; a stop request is handled while waiting."""
        loading = self.loading
        assert loading is not None
        self.loading = None  # so that the engine can be freed
        while not wait([loading], timeout=0.1).done:
            if self.stop.requested:
                raise self.stop.error(self.rows_done, rows.rows)
        return loading.result()

    def _init_row_counts(self, rows: Ingested, done: npt.NDArray[np.bool_]) -> None:
        """Set `rows_done` and `prompts_left`, given `done` [N]: whether each request of the table is committed.

        A prompt counts once, however many texts are scored with it: its completions arrive as one group.
        """
        row = rows.table.row_index
        if (row[1:] > row[:-1]).all():  # one prompt in every row
            self.rows_done = rows.rows - int(np.count_nonzero(~done))
            return
        row, prompt = row[~done], rows.table.prompt_index[~done]
        unfinished, prompts = np.unique(row[first_of_prompt(row, prompt)], return_counts=True)
        several = prompts > 1
        self.prompts_left = dict(zip(unfinished[several].tolist(), prompts[several].tolist(), strict=True))
        self.rows_done = rows.rows - len(unfinished)

    def _generate(self, running: Generation, rows: Ingested, hashes: RequestHashes, writer: PartWriter) -> None:
        for group in running.run(lambda: self._tick(running)):
            began = time.perf_counter()
            self.generated = True
            written = output_rows(group, rows.texts, hashes)
            self._sample(running.state, ends=True)  # so that the part of a row knows the steps of the row
            writer.add(written)
            self.output_seconds += time.perf_counter() - began
            first = written[0].completion
            if first.error is not None and first.row_index not in self.failed:
                self.failed.add(first.row_index)
                self.reasons.add(first, written[0].id)
                rows.errors[first.error.code] += 1
                self._report(rows_error=self._errors(rows))
                self._check_max_errors(rows)
            if left := self.prompts_left.pop(first.row_index, 1) - 1:
                self.prompts_left[first.row_index] = left
            else:
                self.rows_done += 1
        self._sample(running.state, ends=True)
        self._report(rows_done=self.rows_done, left=self.state.left if self.stop.requested else DONE)

    def _sample(self, state: LoopState, *, ends: bool = False) -> None:
        use = state.kv_pages_used / max(1, state.kv_pages)
        self.timeline.add(state.output_tokens, state.prompt_tokens, state.running, use, ends=ends)

    def _tick(self, running: Generation) -> bool:
        """Between two steps: report progress and return whether to stop."""
        state = running.state
        self._sample(state)
        self._report(
            rows_done=self.rows_done,
            completion_tokens=state.output_tokens,
            running=state.running,
            waiting=max(0, (self.state.rows_total or 0) - self.rows_done - state.running),
            kv_use=state.kv_pages_used / max(1, state.kv_pages),
            left=running.time_left(),
        )
        return self.stop.requested

    def _errors(self, rows: Ingested) -> int:
        """Number of rows that failed so far."""
        return rows.errors.total() + self.errors_before

    def _check_max_errors(self, rows: Ingested) -> None:
        errors = self._errors(rows)
        if self.config.max_errors.exceeded(errors, rows.rows - rows.skipped):
            codes = ", ".join(f"{code} {count:,}" for code, count in rows.errors.most_common())
            if self.errors_before:
                codes = ", ".join(filter(None, (codes, f"in earlier runs {self.errors_before:,}")))
            self.nothing_valid = not len(rows.table) and not exists(self.result)
            shown = f"batchgen show {quote(str(self.committed_at))} --errors"
            if self.nothing_valid:
                shown = f"batchgen check {' '.join(map(quote, self.config.inputs))}, with this command's options"
            reason = self.reasons.commonest()
            reason = f"; {reason}" if reason else ""
            raise TooManyErrors(
                f"{errors:,} of {rows.rows:,} rows failed ({codes}), more than --max-errors allows "
                f"({self.config.max_errors}){reason}. See them with: {shown}. "
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

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """The phase in which CPU kernels are compiled; it interrupts the one that needs them."""
        outer = self.state.phase
        self.progress.note(COMPILING)
        with self._phase("compiling"):
            yield
        self.seconds[outer] = self.seconds.get(outer, 0.0) - self.seconds["compiling"]
        self.state = replace(self.state, phase=outer)
        self.progress.update(self.state)
