"""`SampleStates`: hidden states and routed experts of one running sample's output tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from batchgen.kernels.device import to_float32
from batchgen.request.fields.hidden_states import HiddenStates
from batchgen.request.table.request_table import Request

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
StateArray = npt.NDArray[Any]
"""Values in the model's dtype; bfloat16, which numpy does not support, is stored as uint16 bits."""

OutputNeeds = Literal["none", "first", "last", "every", "sum"]


@dataclass(frozen=True, slots=True)
class StateNeeds:
    """Hidden states and experts that one parameter set returns."""

    states: HiddenStates | None
    experts: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """Requested layers, in the row's order."""
        return () if self.states is None else self.states.layers

    @property
    def prompt(self) -> Literal["none", "rows", "sum"]:
        """What is stored of the prompt's states. The last prompt token's state is that of the first output token.

        Of those of `pool: first`, the first row is.
        """
        if self.states is None or self.states.tokens in ("output", "last") or self.states.pool == "last":
            return "none"
        return "sum" if self.states.pool == "mean" else "rows"

    @property
    def output(self) -> OutputNeeds:
        """What is stored of the states of output tokens."""
        if self.states is None:
            return "none"
        tokens, pool = self.states.tokens, self.states.pool
        if tokens == "prompt":
            return "first" if pool == "last" else "none"
        if pool == "first" and tokens != "last":
            return "first" if tokens == "output" else "none"
        if tokens == "last" or pool == "last":
            return "last"
        return "sum" if pool == "mean" else "every"


@dataclass(slots=True, eq=False)
class SampleStates:
    """States and experts stored for a running sample. L is the number of its layers, in the row's order."""

    request: Request
    needs: StateNeeds
    layer_indexes: npt.NDArray[np.int64]
    """[L] index of each layer among all captured layers"""
    num_stored: int = 0
    """Number of stored output tokens, without the latest one"""
    rows: list[StateArray] = field(default_factory=list)
    """[L, H] states of every output token, or of one"""
    sums: Sums | None = None
    """[L, H] sum of states; without the first output token if the prompt's sum includes it"""
    routed: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[MoE layers, K] experts of every output token"""
    latest: tuple[StateArray | None, npt.NDArray[np.int32] | None] | None = None
    """States and experts of the latest token; only the next step or the end decides whether it counts"""
    num_tokens: int = 0
    """Number of output tokens, once the sample has ended"""

    def append(self, states: StateArray | None, routed: npt.NDArray[np.int32] | None) -> None:
        """Append an output token's states [L, H] and experts [MoE layers, K], without a copy; None: not stored."""
        self._store_latest()
        self.latest = states, routed

    def end(self, num_tokens: int) -> None:
        """End the sample with `num_tokens` tokens; later tokens were discarded and do not count.

        The first token's states always count, because they are those of the last prompt token.
        """
        if self.num_stored < max(1, num_tokens):
            self._store_latest()
        self.num_tokens = num_tokens

    def _store_latest(self) -> None:
        if self.latest is None:
            return
        states, routed = self.latest
        if states is not None:
            if self.needs.output == "sum":
                if self.num_stored or self.needs.prompt != "sum":
                    self.sums = to_float32(states).astype(np.float64) + (0.0 if self.sums is None else self.sums)
            elif self.needs.output == "every":
                self.rows.append(states)
            elif self.needs.output == "last" or not self.num_stored:
                self.rows = [states]
        if routed is not None:
            self.routed.append(routed)
        self.num_stored += 1
