"""`Running`: a job that an engine has begun."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.engine.loop import Loop
from batchgen.engine.media.job import JobMedia
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.grouped import GroupedPool
from batchgen.plan.cache_groups import bytes_by_kind
from batchgen.plan.scheduler import Scheduler


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
        workload, record = self.workload.alone(row), self.loop.settings.record
        if record is not None:
            record.run_alone(row)
        kinds = workload.kinds(repeats_end=self.loop.settings.repeat_span is not None)
        samples, config = workload.samples, self.scheduler.config
        scheduler = Scheduler(workload.tree, samples, workload.max_tokens, config, kinds, workload.spans)
        return Running(workload, scheduler, self.loop.again(workload, scheduler), self.pool, self.media)
