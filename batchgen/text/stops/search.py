"""Incremental search for stop strings and patterns in the text of one sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import show
from batchgen.request.fields.stop_patterns import compile_pattern, is_plain
from batchgen.text.stops.hidden_stops import HiddenSearch, HiddenStrings
from batchgen.text.tokens.detokenize import REPLACEMENT, Detokenizer

SEARCH_SECONDS = 0.8
"""Processor time in seconds that the patterns of a sample may take after one token, and in total plus ..."""
SEARCH_SECONDS_PER_TOKEN = 0.005
"""... this many seconds for each of its tokens."""

_TRIM_CHARACTERS = 4096
"""Number of characters no longer needed by any pattern after which they are dropped."""


@dataclass(frozen=True, slots=True)
class Match:
    """A stop that the last token completed. Positions count characters of the whole text."""

    begin: int
    end: int
    fresh: int
    """Position of the first character that the last token added."""
    kind: Literal["string", "regex"]
    stop: str
    """The stop string or the pattern."""
    text: str
    """The matched text."""


class StopSearch:
    """Text of one sample so far, searched after each token. See `stops` for the rules."""

    def __init__(
        self,
        strings: Sequence[str],
        patterns: Sequence[str],
        detokenizer: Detokenizer,
        hidden: HiddenStrings | None = None,
    ) -> None:
        self._strings = strings
        self._hidden = HiddenSearch(hidden) if hidden is not None else None
        self._patterns = _PatternSearch(patterns) if patterns else None
        self._overlap = max(map(len, strings), default=1) - 1
        self._detokenizer = detokenizer
        self._pieces: list[str] = []
        self._stable_length = 0
        """Length of the stable text, which no later token changes: `_pieces` joined."""
        self._overlap_text = ""
        """Last `_overlap` characters of the stable text, in which a string that a new token completes may begin."""
        self._tail = ""
        self._returned = 0
        """Number of characters that `next_output_text` has returned."""

    def append(self, token: int, can_stop: bool, last: bool = False) -> Match | None:
        """Add a token and return the match that it completes, if `can_stop`.

        Patterns do not see the replacement characters of an incomplete character at the end of the text, unless the
        token is the `last` of the sample.

        Raises:
            RowError: `invalid_field`: the patterns take too long.
        """
        piece = self._detokenizer.append(token)
        tail = self._detokenizer.tail
        unchanged = _common_prefix_length(self._tail, piece + tail)
        fresh = self._stable_length + unchanged
        marked = self._hidden is not None and self._hidden.append(token, self._stable_length + len(self._tail))
        first = self._find_string(piece + tail, unchanged, marked) if can_stop and self._strings else None
        if self._patterns is not None:
            match = self._patterns.append(piece, tail if last else tail.rstrip(REPLACEMENT), fresh, can_stop)
            # A string wins over a pattern that begins at the same position.
            if match is not None and (first is None or match.begin < first.begin):
                first = match
        if piece:
            self._pieces.append(piece)
            self._stable_length += len(piece)
            self._overlap_text = (self._overlap_text + piece)[-self._overlap :] if self._overlap else ""
        self._tail = tail
        return first

    def _find_string(self, text: str, unchanged: int, marked: bool) -> Match | None:
        """The first stop string that ends in `text` after its first `unchanged` characters.

        `marked`: the last token is a hidden one that a string names.
        """
        if len(text) <= unchanged and not marked:
            return None
        window = self._overlap_text + text
        offset = self._stable_length - len(self._overlap_text)
        fresh = len(self._overlap_text) + unchanged
        matches = [
            (offset + begin, order, offset + begin + len(stop))
            for order, stop in enumerate(self._strings)
            if (begin := window.find(stop, max(0, fresh - len(stop) + 1))) >= 0
        ]
        if self._hidden is not None and (match := self._hidden.find(window, offset, fresh, marked)) is not None:
            matches.append(match)
        if not matches:
            return None
        begin, order, end = min(matches)
        return Match(begin, end, offset + fresh, "string", self._strings[order], self._strings[order])

    def next_output_text(self) -> str:
        """Text since the last call that no later token changes and no later match cuts."""
        end = self._stable_length - max(
            (size for size in range(1, len(self._overlap_text) + 1) if self._begins_string(self._overlap_text[-size:])),
            default=0,
        )
        if self._hidden is not None:
            offset = self._stable_length - len(self._overlap_text)
            end = min(end, self._stable_length - self._hidden.unsettled(self._overlap_text, offset))
        if self._patterns is not None:
            end = min(end, self._patterns.settled_length)
        self._pieces = ["".join(self._pieces)]
        begin, self._returned = self._returned, max(self._returned, end)
        return self._pieces[0][begin:end]

    def _begins_string(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._strings)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._pieces) + self._tail


class _PatternState:
    """One pattern and the first position at which a match of it may still begin."""

    __slots__ = ("compiled", "pattern", "plain", "start")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.compiled: Any = compile_pattern(pattern)
        self.plain = is_plain(pattern)
        self.start = 0
        """First position at which a match may begin; stays 0 for a pattern that is not plain."""


class _PatternSearch:
    """Incremental search for patterns. Plain ones resume where the last search left a partial match."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._states = [_PatternState(pattern) for pattern in patterns]
        self._text = ""
        """Stable text from position `_offset` on."""
        self._offset = 0
        self._tail = ""
        self._searched = False
        """Whether the current text was searched."""
        self._seconds_left = SEARCH_SECONDS
        self._step_seconds_left = SEARCH_SECONDS
        """Of these, for the current token: other samples wait for it."""

    def append(self, piece: str, tail: str, fresh: int, can_stop: bool) -> Match | None:
        """Add new text and return the first match in the whole text."""
        if piece or tail != self._tail:
            self._text += piece
            self._tail = tail
            self._searched = False
        self._seconds_left += SEARCH_SECONDS_PER_TOKEN
        self._step_seconds_left = min(self._seconds_left, SEARCH_SECONDS)
        if self._searched or not can_stop:
            return None
        self._searched = True
        matches = [(m.start(), order, m) for order, s in enumerate(self._states) if (m := self._search(s)) is not None]
        if not matches:
            self._trim()
            return None
        _, order, match = min(matches, key=lambda item: item[:2])
        begin, end = self._offset + match.start(), self._offset + match.end()
        return Match(begin, end, fresh, "regex", self._states[order].pattern, match.group())

    def _search(self, state: _PatternState) -> Any:
        """The leftmost match, with positions in `_text`; without one, advance the pattern's `start`."""
        # The tail may still change, so a partial match in it does not say where a match may begin.
        partial = state.plain and not self._tail
        began = time.thread_time()
        try:
            match = state.compiled.search(
                self._text + self._tail,
                state.start - self._offset,
                partial=partial,
                timeout=max(self._step_seconds_left, 1e-6),
            )
        except TimeoutError:
            raise RowError(
                ErrorCode.INVALID_FIELD,
                f"`stop_regex` {show(state.pattern)} takes too long to search in this row's output; simplify it "
                "(repeats within repeats, such as (a+)+, may take forever)",
                "stop_regex",
            ) from None
        spent = time.thread_time() - began
        self._seconds_left -= spent
        self._step_seconds_left -= spent
        if match is not None and not match.partial:
            return match
        if partial:
            state.start = self._offset + (len(self._text) if match is None else match.start())
        return None

    @property
    def settled_length(self) -> int:
        """Number of characters in which no match can begin any more; 0 if a pattern is not plain."""
        return min(state.start for state in self._states)

    def _trim(self) -> None:
        """Drop text that no pattern needs."""
        unused = min(state.start for state in self._states) - self._offset
        if unused >= _TRIM_CHARACTERS:
            self._text = self._text[unused:]
            self._offset += unused


def _common_prefix_length(old: str, new: str) -> int:
    """Length of the longest common prefix of two short texts."""
    if new.startswith(old):
        return len(old)
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
