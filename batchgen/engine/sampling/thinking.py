"""Masks of samples that think: the budget of their thoughts, and a constraint that holds for the answer alone.

Where an answer is constrained, its first token may be one of the grammar or the first of a marker that begins thoughts.
Inside the thoughts anything goes but an end of the output, so that there is an answer. Behind them the blank lines that
templates of the family write there are allowed. Between two parts of a format of channels only the markers of the next
part are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.engine.sampling.constraints import GrammarState
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.text.reasoning import ReasoningState

_ALL: Final = -1
"""A word of a mask that allows all of its tokens."""


class ThinkingMask:
    """The mask of one sample's next token; it has the methods of `GrammarState`."""

    def __init__(self, state: ReasoningState, budget: int | None, grammar: GrammarState | None) -> None:
        """Create the mask of a sample without tokens, of at most `budget` tokens of thoughts (None: any number).

        `state` follows its tokens and has received each before `accept`; `grammar`: the constraint of its answer.
        """
        self._state = state
        self._budget = budget
        self._grammar = grammar
        self._forced: list[int] = []
        """Tokens to write next."""
        self._given = 0
        """Number of the answer's tokens that the grammar has received."""
        self._led = False
        """Whether it has received the answer's characters in the token of a marker."""
        self._calls = grammar is not None and grammar.constraint.kind == "tool_choice"
        """Whether the answer must call a tool."""
        self._routes: tuple[tuple[int, ...], ...] = ()
        """Rests of the markers that may be written next."""
        self._bound = False
        """Whether nothing but one of them may be written."""
        self._gap = ""
        """Line breaks that may be written in front of the answer."""
        self._skipped = 0
        """Number of their tokens so far."""
        self.cut = False
        """Whether the budget has ended the thoughts."""
        self.error: ErrorInfo | None = None if grammar is None else grammar.error
        if state.part == "answer" and grammar is not None:
            self._routes = state.parser.opening_ids(calls=self._calls)
            self._bound = state.parser.format.header is not None
        self._plan()

    @property
    def stop_ids(self) -> frozenset[int]:
        """As of `GrammarState`."""
        return frozenset() if self._grammar is None else self._grammar.stop_ids

    @property
    def _answers(self) -> bool:
        """Whether only the grammar decides about the next token."""
        return not (self._forced or self._routes or self._grammar is None) and self._state.part == "answer"

    @property
    def batch_matcher(self) -> Any:
        """As of `GrammarState`."""
        return None if self._grammar is None or self._gap or not self._answers else self._grammar.batch_matcher

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Write the mask of the next token to `words` [ceil(V / 32)]."""
        words.fill(_ALL)
        if self.error is not None:
            return
        if self._forced:
            words.fill(0)
            _allow(words, self._forced[0])
        elif self._grammar is None:
            return
        elif self._routes:
            if self._bound:
                words.fill(0)
            else:
                self._grammar.fill(words)
            for route in self._routes:
                _allow(words, route[0])
        elif self._state.part == "answer":
            self._grammar.fill(words)
            for token, text in self._state.parser.gaps.items():
                if self._gap.startswith(text):
                    _allow(words, token)
        else:
            self._grammar.forbid_stops(words)

    def accept(self, token: int) -> bool:
        """Accept the sampled token; True if only the end can follow. Sets `error` on failure."""
        if self.error is not None:
            return False
        ended = False
        if self._forced:
            del self._forced[0]
        elif self._routes and self._grammar is not None:
            self._follow_route(token)
        if self._answers:  # what the grammar allows belongs to the answer, even if it looks like a marker
            self._state.end_search()
            text = self._state.parser.gaps.get(token)
            if text and self._gap.startswith(text) and self._grammar and not self._grammar.allows(token):
                self._gap = self._gap[len(text) :]
                self._skipped = self._given = self._skipped + 1
            else:
                ended = self._accept_answer()
        self._plan()
        return ended

    def _follow_route(self, token: int) -> None:
        """Go on with the markers that begin with `token`, or with the answer if it belongs to none."""
        assert self._grammar is not None
        routes = tuple(route[1:] for route in self._routes if route[0] == token)
        if not self._bound and routes and any(routes) and self._grammar.allows(token):
            routes = ()  # a marker of several tokens, whose first one may as well begin the answer
        self._routes, self._bound = tuple(filter(None, routes)), True

    def _accept_answer(self) -> bool:
        """Give the grammar the new tokens of the answer, and the characters of it in the marker's last token."""
        grammar, state = self._grammar, self._state
        assert grammar is not None
        ended = False
        if state.lead and not self._led:
            grammar.accept_text(state.lead)
            self._led, self._gap = True, ""
        for token in state.answer_ids[self._given :]:
            ended, self._gap = grammar.accept(token), ""
        self._given = len(state.answer_ids)
        self.error = grammar.error
        return ended

    def _plan(self) -> None:
        """Decide on what must be written next."""
        state = self._state
        if self._forced or self.error is not None:
            return
        if state.part == "thoughts":
            self._routes, self._gap = (), state.parser.format.gap
            if self._budget is not None and state.thinking_tokens + state.pending >= self._budget:
                self._forced = list(state.parser.close_ids(calls=self._calls))
                state.begin_closing()
                self.cut = True
        elif state.part == "header" and self._grammar is not None and not (self._routes or state.pending):
            self._routes, self._bound = state.parser.header_ids(calls=self._calls), True

    def check_can_end(self) -> None:
        """Set an error unless the text may end here. Call it when no token is left to sample."""
        if self._answers and self._grammar is not None:
            self._grammar.check_can_end()
            self.error = self._grammar.error
            return
        field = "thinking_budget" if self._forced or self._grammar is None else self._grammar.constraint.kind
        what = "forbid the marker that ends the thoughts" if self._forced else "left no token to sample"
        message = f"`{field}` ended the row: the row's other masks {what}; allow more tokens in this row"
        self.error = ErrorInfo(ErrorCode.GRAMMAR_ERROR, message, field)

    def satisfied(self, text: str, ids: Seq[int] | None) -> bool | None:
        """Whether a finished answer satisfies the constraint (None: not known); false without an answer."""
        if self._grammar is None:
            return None
        if self._skipped:
            text, ids = text.lstrip(), ids and ids[self._skipped :]
        return self._state.part == "answer" and self._grammar.satisfied(text, ids)


TokenMask = GrammarState | ThinkingMask
"""What decides which tokens a sample may write next."""


def _allow(words: npt.NDArray[np.int32], token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
