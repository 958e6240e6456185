"""`GrammarState`: the grammar matcher of a running sample with a constraint.

Each sample has its own matcher, which accepts every token once. Preemption recomputes tokens but does not sample them
again, so matchers are not affected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.errors import ErrorCode, ErrorInfo, row_error
from batchgen.kernels.shaping import bitmask_width
from batchgen.request.fields.constraint import Constraint
from batchgen.request.fields.params import SamplingParams
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.grammar.kinds import KINDS
from batchgen.text.stops.conditions import all_stop_token_ids

MAX_SECONDS = 30.0
"""Most time for the grammar of one sample; a normal grammar takes less than a millisecond per token."""
_CHECK_SECONDS = 0.5
"""Time in the matcher after which it does not follow the finished text a second time."""

MaskWords = npt.NDArray[np.int32]


class GrammarState:
    """The grammar matcher of one sample, with the mask of its next token if it is already computed."""

    def __init__(self, grammars: Grammars, params: SamplingParams, constraint: Constraint) -> None:
        tokenizer = grammars.tokenizer
        self.constraint = constraint
        self.error: ErrorInfo | None = None
        """Error of the matcher, which ends the row; None: no error."""
        self.seconds = 0.0
        """Time spent in the matcher, except in batched calls."""
        stops = all_stop_token_ids(params, tokenizer.eos_ids)
        # A stop id that is text must match the grammar as text; the others are allowed where the grammar may end.
        self.stop_ids = frozenset(
            token
            for token in stops
            if token < grammars.vocab_size and (token in tokenizer.eos_ids or token in tokenizer.special_ids)
        )
        self._grammars = grammars
        self._batches = grammars.fills_in_batches(constraint)
        self._next_mask: MaskWords | None = None
        self._ended = False
        self._stop_words = _words_of(self.stop_ids, grammars.vocab_size)
        try:
            self.matcher: Any = grammars.matcher(constraint, self.stop_ids)
        except Exception as error:
            self._fail_with(error, "its matcher cannot be created")

    def accept(self, token: int) -> bool:
        """Accept the sampled token; True if only the end can follow, also if called again. Sets `error` on failure."""
        if self._ended or self.error is not None or token in self.stop_ids:
            return self._ended
        matcher, began = self.matcher, time.perf_counter()
        try:
            if not matcher.accept_token(token):
                self._fail(f"its matcher rejects token {token}, which its mask allowed")
                return False
            self._next_mask = None
            if matcher.is_completed():
                self._ended = self._only_stops()
        except Exception as error:
            self._fail_with(error, "its matcher failed")
            return False
        self._spend(time.perf_counter() - began)
        return self._ended

    def check_can_end(self) -> None:
        """Set an error unless the text may end here. Call it when no token is left to sample."""
        if self.error is None and not self.matcher.is_completed():
            self._fail("it and the row's other masks left no token to sample; allow more tokens in this row")

    def satisfied(self, text: str, ids: Seq[int] | None) -> bool | None:
        """Whether a finished text satisfies the constraint (None: not known); `ids`: its tokens, if they spell it.

        The grammar itself checks some kinds, in one call that cannot be ended: not if it was slow already.
        """
        if KINDS[self.constraint.kind].check is None and self.seconds > _CHECK_SECONDS:
            return None
        return self._grammars.satisfied(self.constraint, text, ids)

    def fill(self, words: MaskWords) -> None:
        """Write the mask of the next token to `words` [ceil(V / 32)]."""
        if self.error is not None:
            words.fill(-1)  # the sampled token is discarded
            return
        if self._next_mask is not None:
            words[:] = self._next_mask
            return
        began = time.perf_counter()
        try:
            self.matcher.fill_next_token_bitmask(torch.from_numpy(words[None]))
        except Exception as error:
            words.fill(-1)
            self._fail_with(error, "its matcher failed")
        self._spend(time.perf_counter() - began)

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if self._next_mask is None:
            words: MaskWords = np.empty(len(self._stop_words), np.int32)
            self.fill(words)
            self._next_mask = words
        return bool(self._next_mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def forbid_stops(self, words: MaskWords) -> None:
        """Remove the ids that end the sample from `words` [ceil(V / 32)]."""
        words &= ~self._stop_words

    def accept_text(self, text: str) -> None:
        """Accept characters that are not a whole token. Sets `error` on failure."""
        try:
            if self.error is None and not self.matcher.accept_string(text):
                self._fail(f"the model wrote {text!r} into the token of a marker, which it does not allow")
        except Exception as error:
            self._fail_with(error, "its matcher failed")

    @property
    def batch_matcher(self) -> Any:
        """The matcher, if it is to fill the next mask, together with those of other samples; None: use `fill`."""
        return self.matcher if self._batches and self._next_mask is None and self.error is None else None

    def _only_stops(self) -> bool:
        """Whether the mask of the next token only allows stop ids; the mask is cached for the next step."""
        words: MaskWords = np.empty(len(self._stop_words), np.int32)
        self.fill(words)
        self._next_mask = words
        return not (words & ~self._stop_words).any()

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds > MAX_SECONDS:
            self._fail(f"following it took more than {MAX_SECONDS:g} seconds; make it less ambiguous")

    def _fail_with(self, error: Exception, problem: str) -> None:
        """End the row with what its matcher raised: its own errors are `RuntimeError`s."""
        info = row_error(error, "following the constraint")
        if type(error) is RuntimeError:
            self._fail(f"{problem}: {error}")
        else:
            self.error = replace(info, param=self.constraint.kind)

    def _fail(self, problem: str) -> None:
        field = self.constraint.kind
        self.error = ErrorInfo(ErrorCode.GRAMMAR_ERROR, f"`{field}` ended the row: {problem}", field)


def _words_of(tokens: Seq[int] | frozenset[int], vocab: int) -> MaskWords:
    """A packed mask with the bits of `tokens` set."""
    bits = np.zeros(bitmask_width(vocab) * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
