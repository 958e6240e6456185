"""Scheduler configuration and counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal

from batchgen.plan.cache_groups import ONE_BYTE_PAGES, CacheGroup, held_groups

Order = Literal["longest", "tree", "first-come"]
"""Order in which prompts begin; see `order.begin_order`."""
Admit = Literal["foreseen", "free"]
"""When a prompt begins: once the pages last for all samples until their expected ends, or once there are free pages."""

GROUP_MIN_SAVING: Final = 256
"""Default of `SchedulerConfig.group_min_saving`, for devices without a measured or known value."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the KV pool and of a step.

    Raises:
        ValueError: a limit is out of range; the message names it.
    """

    num_pages: int
    """Number of pages of page tables, including the scratch page: those of the pool of each group that keeps every
    position."""
    page_size: int
    """Number of positions per page, S."""
    max_num_seqs: int
    """Maximum number of samples running at once."""
    max_tokens_per_step: int
    """Maximum number of prefill tokens plus decode rows in a step."""
    group_min_saving: int = GROUP_MIN_SAVING
    """Reads of cached positions that a prefix group must save per step to be worth its pass."""
    group_rows: int | None = None
    """Number of rows of the group that `group_min_saving` refers to: half of it is the cost of merging the rows'
    partial results, so that larger groups must save more. None: the same for any group."""
    start_together: int = 8
    """A prompt waits until this many of its samples (or all it has) can begin at once. If only pages are short, a
    quarter of the running samples is enough."""
    order: Order = "longest"
    admission: Admit = "foreseen"
    cache_groups: tuple[CacheGroup, ...] = ONE_BYTE_PAGES
    """What the model's layers keep of each page's positions."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "start_together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is scratch), got {self.num_pages}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sample decodes in every step"
            )
        for group in held_groups(self.cache_groups):
            if group.num_pages < (least := group.least_pages(self.page_size)):
                raise ValueError(f"{group.kind}_pages must be at least {least}, got {group.num_pages}")
        if self.group_min_saving < 0:
            raise ValueError(f"group_min_saving must not be negative, got {self.group_min_saving}")
        if self.group_rows is not None and self.group_rows < 1:
            raise ValueError(f"group_rows must be at least 1, got {self.group_rows}")

    @property
    def group_costs(self) -> tuple[float, float]:
        """Reads that a prefix group must save: a constant, and an amount per row."""
        if self.group_rows is None:
            return self.group_min_saving, 0
        return self.group_min_saving / 2, self.group_min_saving / (2 * self.group_rows)


@dataclass(slots=True)
class SchedulerStats:
    """Counters summed over the steps planned so far."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt positions computed for the first time."""
    recomputed_tokens: int = 0
    """Positions recomputed after an eviction or a preemption."""
    recomputed_last_tokens: int = 0
    """Last prompt positions recomputed only for their logits."""
    decode_tokens: int = 0
    """Output tokens fed to the model."""
    sampled_tokens: int = 0
    """Tokens sampled and kept."""
    prefill_chunks: int = 0
    preemptions: int = 0
    evicted_nodes: int = 0
    page_copies: int = 0
    peak_pages: int = 0
    peak_window_pages: int = 0
    peak_states: int = 0
    """Most recurrent states at once, of nodes and of sequences."""
    max_decode_rows: int = 0
    slots: int = 0
    """Samples that could run at once with unlimited pages: the smaller of the job's samples and `max_num_seqs`."""
    tail_steps: int = 0
    """Steps after the one in which the last sample began."""
    tail_tokens: int = 0
    """Tokens sampled in the tail steps."""
    group_passes: int = 0
    """Prefix groups, summed over steps."""
    decode_kv_positions: int = 0
    """Cached positions that the decode rows attend to, i.e. the reads without prefix groups."""
    decode_kv_reads: int = 0
    """Cached positions read for the decode rows with prefix groups."""
    chunk_kv_positions: int = 0
    """Cached positions that the prefill chunks attend to, including their own."""
    chunk_reads: int = 0
    """The same, summed over the positions of each chunk."""
    oom_retries: int = 0
    """Attempts at a step, or at a part of one, that ran out of memory."""
    tokens_per_step: int = 0
    """Maximum number of tokens in a step at the end of the run; below the configured value after running out of
    memory."""

    @property
    def occupancy(self) -> float:
        """Sampled tokens divided by those of full steps; 1.0 without steps."""
        return _share(self.sampled_tokens, self.steps * self.slots)

    @property
    def tail_efficiency(self) -> float:
        """Sampled tokens divided by those of full steps, over the tail steps."""
        return _share(self.tail_tokens, self.tail_steps * self.slots)

    def as_dict(self) -> dict[str, int | float]:
        """Every counter and ratio, by name."""
        return {**asdict(self), "occupancy": self.occupancy, "tail_efficiency": self.tail_efficiency}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
