"""Hidden states that a row requests, and those that a model can return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from batchgen.errors import ErrorCode
from batchgen.request.checks import Integer, boolean, error_at, invalid, one_of, plain, show

_LAYER = Integer(-1, 1 << 20)
_MAX_NUMBERS = 2**31 - 1
"""Most numbers in a list of one output row."""

StatePool = Literal["none", "first", "last", "mean"]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states that a row requests.

    Raises:
        RowError: `invalid_field` for a value out of its range.
    """

    layers: tuple[int, ...] = (-1,)
    """0: the embeddings, i: the output of block i, -1: after the final norm."""
    tokens: Literal["prompt", "output", "all", "last"] = "all"
    """Tokens whose states are returned."""
    pool: StatePool = "none"
    """Reduction over the tokens."""

    def __post_init__(self) -> None:
        name = "return_hidden_states"
        layers = plain(self.layers)
        if type(layers) not in (list, tuple) or not layers:
            raise invalid(name, f"must have a list of integers as `layers`, got {show(self.layers)}")
        object.__setattr__(self, "layers", tuple(_LAYER(name, layer) for layer in layers))
        if len(set(self.layers)) != len(self.layers):
            raise invalid(name, "must name each layer once")
        one_of("prompt", "output", "all", "last")(name, self.tokens)
        one_of("none", "first", "last", "mean")(name, self.pool)

    def max_rows(self, prompt: int, output: int) -> int:
        """Most state vectors of a layer for `prompt` and `output` tokens."""
        if self.pool != "none" or self.tokens == "last":
            return 1
        return {"prompt": prompt, "output": output, "all": prompt + max(0, output - 1)}[self.tokens]


def hidden_states(name: str, value: Any) -> HiddenStates | None:
    """Check a boolean or an object of `layers`, `tokens` and `pool`; false becomes None."""
    if type(value) is HiddenStates:
        return value
    if type(value) is not dict:
        return HiddenStates() if boolean(name, value) else None
    present = {key: item for key, item in value.items() if item is not None}
    odd = next((key for key in present if key not in HiddenStates.__dataclass_fields__), None)
    if odd is not None:
        raise invalid(name, f"has the keys `layers`, `tokens` and `pool`, got {show(odd)}")
    return HiddenStates(**present)


@dataclass(frozen=True, slots=True)
class CaptureSupport:
    """Hidden states and routed experts that a model can return."""

    layers: int | None = None
    """Index of the last layer; None if the model exposes no hidden states."""
    hidden_size: int = 0
    """Numbers in a state, H."""
    experts: bool = False
    """Whether the model is a mixture of experts whose routing can be read."""

    def check(self, states: HiddenStates | None, experts: bool, prompt: int, output: int) -> None:
        """Check that the model can return what a row requests.

        Args:
            states: the states that the row requests.
            experts: whether it requests its routed experts.
            prompt: number of prompt tokens.
            output: most tokens of a completion.

        Raises:
            RowError: `unsupported_field` or `invalid_field`.
        """
        if states is not None:
            self._check_states(states, states.max_rows(prompt, output))
        if experts and not self.experts:
            problem = "needs a mixture of experts whose routing can be read, which this model is not; remove it"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, "return_routed_experts", problem)

    def _check_states(self, states: HiddenStates, rows: int) -> None:
        name = "return_hidden_states"
        if self.layers is None:
            problem = "is not supported for this model, because its decoder blocks cannot be identified; remove it"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, name, problem)
        if max(states.layers) > self.layers:
            layers = f"0 (embeddings) to {self.layers}, and -1 (after the final norm)"
            raise invalid(name, f"names layer {max(states.layers)}; the model has {layers}")
        if rows * self.hidden_size > _MAX_NUMBERS:
            problem = f"may have more than {_MAX_NUMBERS} numbers per layer; pool the states or shorten the row"
            raise invalid(name, problem)
