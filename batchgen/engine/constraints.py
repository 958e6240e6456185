"""Grammars of running samples: what each may draw next, as one packed mask for the constrained rows of a step.

Rows without a constraint cost nothing here. A matcher belongs to its sample: it is told of every token once, so
preemption, which computes tokens anew but draws none again, does not touch it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops
from batchgen.params import Constraint, SamplingParams
from batchgen.text.grammars import Grammars
from batchgen.text.stops import stopping_ids

__all__ = ["Constrained", "GrammarMasks", "GrammarState"]

_SECONDS = 30.0
"""Time that the grammar of one sample may take while it runs; a sane one takes a millisecond per token at most."""
_SLOW_FILL = 0.25
"""Seconds of one step's masks after which each is timed by itself."""

Words = npt.NDArray[np.int32]


class Constrained(Protocol):
    """A sample with a constraint."""

    @property
    def ended(self) -> bool:
        """Whether its last token is out."""
        ...

    @property
    def grammar(self) -> GrammarState | None:
        """Its matcher."""
        ...


class GrammarState:
    """The matcher of one sample, and the mask of its next token once that is known."""

    def __init__(self, grammars: Grammars, params: SamplingParams, constraint: Constraint) -> None:
        tokenizer = grammars.tokenizer
        self.constraint = constraint
        self.error: ErrorInfo | None = None
        """Set where the matcher failed: the row ends with it."""
        self.seconds = 0.0
        """Time its own calls took."""
        stops = stopping_ids(params, tokenizer.eos_ids)
        # A stop id that is plain text is text to the grammar; the others may be drawn where the grammar may end.
        self.stop_ids = frozenset(
            token
            for token in stops
            if token < grammars.vocab_size and (token in tokenizer.eos_ids or token in tokenizer.special_ids)
        )
        self._grammars = grammars
        self._known: Words | None = None
        self._stop_words = _words_of(self.stop_ids, grammars.vocab_size)
        try:
            self.matcher: Any = grammars.matcher(constraint, self.stop_ids)
        except (RuntimeError, MemoryError) as error:
            self._fail(f"its matcher cannot be made: {error}")

    def accept(self, token: int) -> bool:
        """Take the token that was drawn; True if nothing but the end can follow. See `error` for failures."""
        if self.error is not None or token in self.stop_ids:
            return False
        began = time.perf_counter()
        try:
            if not self.matcher.accept_token(token):
                self._fail(f"its matcher rejects token {token}, which was drawn from its mask")
                return False
            self._known = None
            ended = bool(self.matcher.is_completed()) and self._only_stops()
        except RuntimeError as error:
            self._fail(f"its matcher failed: {error}")
            return False
        self._spend(time.perf_counter() - began)
        return ended

    def exhausted(self) -> None:
        """Nothing is left to draw, for whatever reason: that is an error unless the text may end here."""
        if self.error is None and not self.matcher.is_completed():
            self._fail("it and the row's other masks left no token to draw; let the row draw another token")

    def satisfied(self, text: str, ids: Seq[int] | None) -> bool:
        """Whether a finished text satisfies the constraint; `ids`: its tokens, where they spell it."""
        return self._grammars.satisfied(self.constraint, text, ids)

    def fill(self, words: Words) -> None:
        """Write the mask of the next token to `words` [ceil(V / 32)]."""
        if self.error is not None:
            words.fill(-1)  # whatever is drawn is dropped
            return
        if self._known is not None:
            words[:] = self._known
            return
        began = time.perf_counter()
        try:
            self.matcher.fill_next_token_bitmask(torch.from_numpy(words[None]))
        except RuntimeError as error:
            words.fill(-1)
            self._fail(f"its matcher failed: {error}")
        self._spend(time.perf_counter() - began)

    @property
    def known(self) -> bool:
        """Whether `fill` has nothing to compute."""
        return self._known is not None or self.error is not None

    def _only_stops(self) -> bool:
        """Whether the mask of the next token holds no other ids than stops; it is kept for the next step."""
        words: Words = np.empty(len(self._stop_words), np.int32)
        self.fill(words)
        self._known = words
        return not (words & ~self._stop_words).any()

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds > _SECONDS:
            self._fail(f"following it took more than {_SECONDS:g} seconds; make it less ambiguous")

    def _fail(self, problem: str) -> None:
        field = self.constraint.kind
        self.error = ErrorInfo(ErrorCode.GRAMMAR_ERROR, f"`{field}` ended the row: {problem}", field)


class GrammarMasks:
    """Masks the constrained rows of each step, which change seldom, together and on several threads."""

    def __init__(self, rows: Seq[tuple[int, Constrained]], device: Device, ops: Ops) -> None:
        """`rows`: the constrained rows, and their places in the step."""
        self._device = device
        self._ops = ops
        self._rows = [row for _, row in rows]
        (self._places,) = device.upload(np.array([i for i, _ in rows], np.int64))
        self._slow = False

    def fill(self, vocab: int) -> Tensor:
        """What each row may draw next: [M, ceil(V / 32)] int32; nothing of the step is needed for it.

        Everything where a row has ended already: its draw is dropped.
        """
        states = [None if row.ended else row.grammar for row in self._rows]
        words: Words = np.empty((len(states), bitmask_width(vocab)), np.int32)
        waiting = [i for i, state in enumerate(states) if state is not None and not state.known]
        began = time.perf_counter()
        matchers = [state.matcher for state in states if state is not None and not state.known]
        together = len(waiting) > 1 and not self._slow and _fill_together(matchers, waiting, words)
        for i, state in enumerate(states):
            if state is None:
                words[i] = -1
            elif state.known or not together:
                state.fill(words[i])
        self._slow = time.perf_counter() - began > _SLOW_FILL
        (masks,) = self._device.upload(words)
        return masks

    def apply(self, logits: Tensor, masks: Tensor) -> None:
        """Bar what `masks` (of `fill`) do not allow from `logits` [R, V] float32, in place."""
        self._ops.apply_bitmask(logits, masks, self._places)


def _fill_together(matchers: list[Any], places: list[int], words: Words) -> bool:
    try:
        _batch_matcher().batch_fill_next_token_bitmask(matchers, torch.from_numpy(words), places)
    except RuntimeError:
        return False  # one by one, to know whose it is
    return True


@lru_cache(maxsize=1)
def _batch_matcher() -> Any:
    # Imported here: xgrammar takes seconds, and was loaded with the first matcher.
    import xgrammar

    return xgrammar.BatchGrammarMatcher()


def _words_of(tokens: Seq[int] | frozenset[int], vocab: int) -> Words:
    """A mask with the bits of `tokens` set."""
    bits = np.zeros(bitmask_width(vocab) * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
