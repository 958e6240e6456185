"""What the scheduler is told and what it counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal

__all__ = ["GROUP_MIN_SAVING", "Admit", "Order", "SchedulerConfig", "SchedulerStats"]

Order = Literal["longest", "tree", "first-come"]
"""Which prompt begins next; see `order.begin_order`."""
Admit = Literal["foreseen", "free"]
"""When it begins: when the pages last for all to their expected ends, or as soon as there are free ones."""

GROUP_MIN_SAVING: Final = 256
"""What a pass over a group's pages must save where nobody knows better: compiled kernels measure it, chips name it."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the pool and of a step.

    Raises:
        ValueError: a limit is out of range, naming it.
    """

    num_pages: int
    """Pages of the pool, the scratch page included."""
    page_size: int
    """Positions of a page, S."""
    max_num_seqs: int
    """Most samples begun and not ended at once."""
    max_tokens_per_step: int
    """Most prefill tokens and decode rows of a step together."""
    group_min_saving: int = GROUP_MIN_SAVING
    """Reads of cached positions that a prefix group must save per step to be worth its pass."""
    group_rows: int | None = None
    """Rows of the group that this is said of: half of it is for what each of them leaves to be merged, so that more of
    them must save more. None: of any group."""
    start_together: int = 8
    """A prompt waits until so many of its samples (or all it has) can begin at once; where it is pages that are short,
    until a quarter of those under way can, if that is fewer."""
    order: Order = "longest"
    admission: Admit = "foreseen"

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "start_together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is scratch), got {self.num_pages}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every sample begun decodes in every step"
            )
        if self.group_min_saving < 0:
            raise ValueError(f"group_min_saving must not be negative, got {self.group_min_saving}")
        if self.group_rows is not None and self.group_rows < 1:
            raise ValueError(f"group_rows must be at least 1, got {self.group_rows}")

    @property
    def group_costs(self) -> tuple[float, float]:
        """Reads that a prefix group must save, whatever its rows, and for each of them."""
        if self.group_rows is None:
            return self.group_min_saving, 0
        return self.group_min_saving / 2, self.group_min_saving / (2 * self.group_rows)


@dataclass(slots=True)
class SchedulerStats:
    """Counted work, summed over the steps planned so far."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt positions computed for the first time."""
    recomputed_tokens: int = 0
    """Positions computed again after an eviction or a preemption."""
    relogit_tokens: int = 0
    """Last prompt positions computed again only for their logits."""
    decode_tokens: int = 0
    """Output tokens fed to the model."""
    sampled_tokens: int = 0
    """Tokens drawn and kept."""
    prefill_chunks: int = 0
    preemptions: int = 0
    evicted_nodes: int = 0
    page_copies: int = 0
    peak_pages: int = 0
    max_decode_rows: int = 0
    slots: int = 0
    """Samples that could be under way at once, were there pages for all: the job's, or `max_num_seqs`."""
    tail_steps: int = 0
    """Steps after the one in which the last sample began."""
    tail_tokens: int = 0
    """Tokens drawn in those steps."""
    group_passes: int = 0
    """Prefix groups, summed over steps."""
    decode_kv_positions: int = 0
    """Cached positions that the decode rows attend to: what reads without groups cost."""
    decode_kv_reads: int = 0
    """Cached positions read for the decode rows with groups."""
    chunk_kv_positions: int = 0
    """Cached positions that the prefill chunks attend to, the chunks' own included."""
    oom_retries: int = 0
    """Tries of a step, or of a part of one, that ran out of memory."""
    tokens_per_step: int = 0
    """Most tokens of a step, at the end: less than was asked for where memory ran out."""

    @property
    def occupancy(self) -> float:
        """Tokens drawn and kept over those that full steps would have drawn; 1.0 of no steps."""
        return _share(self.sampled_tokens, self.steps * self.slots)

    @property
    def tail_efficiency(self) -> float:
        """Tokens drawn over those of full steps, where nothing was left to begin."""
        return _share(self.tail_tokens, self.tail_steps * self.slots)

    def as_dict(self) -> dict[str, int | float]:
        """Every figure by its name."""
        return {**asdict(self), "occupancy": self.occupancy, "tail_efficiency": self.tail_efficiency}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
