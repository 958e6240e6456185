"""Parameters of a rotary embedding. Separate from `rope`, so that they can be checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: Final[tuple[str, ...]] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of one RoPE scaling rule. Fields that a `kind` does not use keep their defaults."""

    kind: RopeKind
    dim: int
    """D, the rotated size of a head; even."""
    theta: float
    max_positions: int
    """`max_position_embeddings`."""
    factor: float = 1.0
    original_positions: int = 0
    """llama3, yarn, longrope: the context length before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
