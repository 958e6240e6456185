"""`SamplingParams`: how one row is to be continued. Validated once, here; everything below trusts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchgen.errors import ErrorCode, RowError

__all__ = ["GREEDY_TEMPERATURE", "MAX_STOPS", "SamplingParams"]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy and draw no noise."""

MAX_STOPS = 32
"""Most stop strings a row may name."""

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a prompt, what ends it and what to return with it.

    Raises:
        RowError: `invalid_field`, naming the field, for any value out of its range.
    """

    max_new_tokens: int | None = 128
    """Most tokens to generate; None means up to the end of the context."""
    min_new_tokens: int = 0
    """Every id that would stop the row is masked until this many tokens are out."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens (0 is accepted and normalised to -1)."""
    min_p: float = 0.0
    seed: int | None = None
    """None: derived from the run seed and the row's id."""
    n: int = 1
    stop: tuple[str, ...] = ()
    """A single string and a list are taken too."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_logprob: bool = False
    top_logprobs_num: int = 0

    def __post_init__(self) -> None:
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if type(self.stop) is not tuple:
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if type(self.stop_token_ids) is not tuple:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_lengths()
        self._check_sampling()
        self._check_stops()
        _check_int("top_logprobs_num", self.top_logprobs_num, 0, 1 << 20)

    def _check_lengths(self) -> None:
        if self.max_new_tokens is not None:
            _check_int("max_new_tokens", self.max_new_tokens, 0, 1 << 31)
        _check_int("min_new_tokens", self.min_new_tokens, 0, 1 << 31)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _invalid(
                "min_new_tokens", f"must not exceed max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        _check_int("n", self.n, 1, 1 << 20)

    def _check_sampling(self) -> None:
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 1 << 31)
        if self.seed is not None:
            _check_int("seed", self.seed, -_INT64_MAX - 1, _INT64_MAX)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise _invalid("stop", f"takes at most {MAX_STOPS} strings, got {len(self.stop)}")
        if any(not s for s in self.stop):
            raise _invalid("stop", "must not hold an empty string")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 1 << 31)

    @property
    def greedy(self) -> bool:
        """Whether the row takes the most likely token and draws nothing."""
        return self.temperature < GREEDY_TEMPERATURE


def _invalid(name: str, problem: str) -> RowError:
    return RowError(ErrorCode.INVALID_FIELD, f"`{name}` {problem}", name)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:
        raise _invalid(name, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise _invalid(name, f"must be between {low} and {high}, got {value}")


def _check_float(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise _invalid(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high or (low_open and value == low):  # type: ignore[operator]
        bracket = "(" if low_open else "["
        raise _invalid(name, f"must be in {bracket}{low:g}, {high:g}], got {value}")
