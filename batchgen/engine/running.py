"""`Running`: a job that an engine has begun; and the progress bar of the Python API."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from batchgen.engine.loop import Loop
from batchgen.engine.media.job import JobMedia
from batchgen.engine.parallel.peers import Alone
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.grouped import GroupedPool
from batchgen.plan.cache_groups import bytes_by_kind
from batchgen.plan.scheduler import Scheduler
from batchgen.request.completion import Completion


@dataclass(frozen=True, slots=True)
class Running:
    """A running job: iterate `loop.run()` for its completions; `scheduler.stats` has its counters."""

    workload: JobWorkload
    scheduler: Scheduler
    loop: Loop
    pool: GroupedPool
    media: JobMedia | None = None
    """The job's images and sounds; None: no row has any"""

    @property
    def kv_peak_bytes(self) -> dict[str, int]:
        """Most bytes of pages in use at once, by kind of layers."""
        return bytes_by_kind(self.scheduler.config.cache_groups, self.scheduler.group_peaks)

    def alone(self, row: int) -> Running:
        """The run of one row that this job has held, in the same pool, when this job has run."""
        self.loop.peers.tell(Alone(row))
        workload, record = self.workload.alone(row), self.loop.settings.record
        if record is not None:
            record.run_alone(row)
        kinds = workload.kinds(repeats_end=self.loop.settings.repeat_span is not None)
        samples, config = workload.samples, self.scheduler.config
        scheduler = Scheduler(workload.tree, samples, workload.max_tokens, config, kinds, workload.spans)
        return Running(workload, scheduler, self.loop.again(workload, scheduler), self.pool, self.media)


_EVERY: Final = 0.5
"""Seconds between two figures of the speed."""


class PromptsBar:
    """Progress bar of a call of `Engine.generate`, on stderr, by tqdm, which draws in terminals and in notebooks.

    Args:
        wanted: whether it is shown; None: if stderr is a terminal, or in a notebook.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._bar: Any = None
        self._began = self._due = 0.0
        if _is_watched() if wanted is None else wanted:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without ipywidgets it draws text
                from tqdm.auto import tqdm

                self._bar = tqdm(desc="reading", unit=" rows", dynamic_ncols=True)

    @property
    def is_shown(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def read(self) -> None:
        """Count a row that was read."""
        if self._bar is not None:
            self._bar.update()

    def begin(self, prompts: int) -> None:
        """Begin to count prompts that are done."""
        if self._bar is not None:
            self._bar.unit = " prompts"
            self._bar.set_description("generating", refresh=False)
            self._bar.reset(total=prompts)
            self._began = time.monotonic()

    def step(self, tokens: int) -> bool:
        """Show the speed after so many output tokens; False, as the job goes on."""
        if self._bar is not None and (now := time.monotonic()) >= self._due:
            self._due = now + _EVERY
            self._bar.set_postfix_str(f"{tokens / max(now - self._began, 1e-9):,.0f} tokens/s")
        return False

    def count(self, groups: Iterator[list[Completion]]) -> Iterator[list[Completion]]:
        """The completions of one prompt at a time, which are counted."""
        for group in groups:
            if self._bar is not None:
                self._bar.update()
            yield group

    def close(self) -> None:
        """Draw the last state."""
        if self._bar is not None:
            self._bar.close()


def _is_watched() -> bool:
    """Whether stderr is a terminal, or the process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or (sys.stderr is not None and sys.stderr.isatty())
