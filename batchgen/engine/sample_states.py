"""What one running sample keeps of the tokens it draws from: hidden states and routed experts, draw by draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from batchgen.params import HiddenStates
from batchgen.request import Request

__all__ = ["Floats", "SampleStates", "Stored", "Sums", "Wanted", "floats"]

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
Stored = npt.NDArray[Any]
"""Values in the model's own format; numpy has no bfloat16, so its bits stand in uint16."""

Draws = Literal["none", "first", "last", "every", "sum"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one set of parameters asks for."""

    states: HiddenStates | None
    experts: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers in the order asked for."""
        return () if self.states is None else self.states.layers

    @property
    def prompt(self) -> Literal["none", "rows", "sum"]:
        """What is kept of the prompt's states. The last token's is that of the first draw."""
        if self.states is None or self.states.tokens in ("output", "last") or self.states.pool == "last":
            return "none"
        return "sum" if self.states.pool == "mean" else "rows"

    @property
    def draws(self) -> Draws:
        """What is kept of the states that tokens are drawn from."""
        if self.states is None:
            return "none"
        tokens, pool = self.states.tokens, self.states.pool
        if tokens == "prompt":
            return "first" if pool == "last" else "none"
        if tokens == "last" or pool == "last":
            return "last"
        return "sum" if pool == "mean" else "every"


@dataclass(slots=True, eq=False)
class SampleStates:
    """What a running sample has kept. L are the layers it wants, in its order."""

    request: Request
    wanted: Wanted
    places: npt.NDArray[np.int64]
    """[L] where its layers stand among all that are tapped"""
    count: int = 0
    """Draws kept, without the latest."""
    rows: list[Stored] = field(default_factory=list)
    """[L, H] of every draw, or of a single one."""
    sums: Sums | None = None
    """[L, H]; without the first draw, where the prompt's sum has it."""
    routed: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[MoE layers, K] of every draw"""
    latest: tuple[Stored | None, npt.NDArray[np.int32] | None] | None = None
    """[L, H] and choices of the latest draw, of which only the next step or the end tells whether it counts."""
    drawn: int = 0
    """C, once the sample has ended."""

    def take(self, states: Stored | None, routed: npt.NDArray[np.int32] | None) -> None:
        """Take a draw: its states [L, H] and choices [MoE layers, K], not copied; None for what is not kept."""
        self._keep_latest()
        self.latest = states, routed

    def end(self, drawn: int) -> None:
        """The sample has ended with `drawn` tokens; a draw past them was dropped and does not count.

        The first draw's states do, also where no token came of it: they are those of the prompt's last token.
        """
        if self.count < max(1, drawn):
            self._keep_latest()
        self.drawn = drawn

    def _keep_latest(self) -> None:
        if self.latest is None:
            return
        states, routed = self.latest
        if states is not None:
            if self.wanted.draws == "sum":
                if self.count or self.wanted.prompt != "sum":
                    self.sums = floats(states).astype(np.float64) + (0.0 if self.sums is None else self.sums)
            elif self.wanted.draws == "every":
                self.rows.append(states)
            elif self.wanted.draws == "last" or not self.count:
                self.rows = [states]
        if routed is not None:
            self.routed.append(routed)
        self.count += 1


def floats(values: Stored) -> Floats:
    """The values as float32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
