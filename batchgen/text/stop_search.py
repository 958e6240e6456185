"""Finds stop strings and patterns in text that grows by tokens, looking at no more of it than it must."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.checks import show
from batchgen.errors import ErrorCode, RowError
from batchgen.patterns import compile_pattern, is_plain
from batchgen.text.detokenize import REPLACEMENT, Detokenizer

__all__ = ["Match", "StopSearch"]

SEARCH_SECONDS = 1.0
"""Seconds of computing that the patterns of a sample may take in all, ..."""
SEARCH_SECONDS_PER_TOKEN = 0.005
"""... and as many more for each of its tokens."""

_TRIM = 4096
"""Characters that no pattern needs any more are dropped once there are so many."""


@dataclass(frozen=True, slots=True)
class Match:
    """A stop that the last token completed. Places count characters of the whole text."""

    begin: int
    end: int
    fresh: int
    """First character that the last token brought."""
    kind: Literal["string", "regex"]
    stop: str
    """The string, or the pattern."""
    text: str


class StopSearch:
    """The text of one sample so far, searched after each token. See `stops` for the rules."""

    def __init__(self, strings: Sequence[str], patterns: Sequence[str], detokenizer: Detokenizer) -> None:
        self._strings = strings
        self._patterns = _PatternSearch(patterns) if patterns else None
        self._overlap = max(map(len, strings), default=1) - 1
        self._detokenizer = detokenizer
        self._pieces: list[str] = []
        self._certain = 0
        """Length of the certain text, which is `_pieces` joined."""
        self._recent = ""
        """Its last `_overlap` characters: where a string that a new token completes may begin."""
        self._tail = ""
        self._said = 0
        """Characters that `settled` has returned."""

    def append(self, token: int, armed: bool, last: bool = False) -> Match | None:
        """Take a token; the match it completes, looked for only while `armed`.

        No pattern sees the replacement characters that stand for a character's first bytes, unless the token is the
        `last`: nothing completes them any more.

        Raises:
            RowError: `invalid_field`: the patterns take too long.
        """
        piece = self._detokenizer.append(token)
        tail = self._detokenizer.tail
        shared = _shared_length(self._tail, piece + tail)
        fresh = self._certain + shared
        found = self._find_string(piece + tail, shared) if armed and self._strings else None
        if self._patterns is not None:
            match = self._patterns.append(piece, tail if last else tail.rstrip(REPLACEMENT), fresh, armed)
            # Of two that begin together the string wins: strings are listed first.
            if match is not None and (found is None or match.begin < found.begin):
                found = match
        if piece:
            self._pieces.append(piece)
            self._certain += len(piece)
            self._recent = (self._recent + piece)[-self._overlap :] if self._overlap else ""
        self._tail = tail
        return found

    def _find_string(self, text: str, shared: int) -> Match | None:
        """The first string that ends in `text` past its first `shared` characters."""
        if len(text) <= shared:
            return None
        window = self._recent + text
        fresh = len(self._recent) + shared
        found = [
            (begin, order)
            for order, stop in enumerate(self._strings)
            if (begin := window.find(stop, max(0, fresh - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        begin, order = min(found)
        stop = self._strings[order]
        offset = self._certain - len(self._recent)
        return Match(offset + begin, offset + begin + len(stop), offset + fresh, "string", stop, stop)

    def settled(self) -> str:
        """Certain text, beyond that of the last call, in which no match can begin any more."""
        end = self._certain - max(
            (size for size in range(1, len(self._recent) + 1) if self._begins_string(self._recent[-size:])), default=0
        )
        if self._patterns is not None:
            end = min(end, self._patterns.settled)
        self._pieces = ["".join(self._pieces)]
        begin, self._said = self._said, max(self._said, end)
        return self._pieces[0][begin:end]

    def _begins_string(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._strings)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._pieces) + self._tail


class _Watch:
    """One pattern, and where in the text a match of it may yet begin."""

    __slots__ = ("compiled", "pattern", "plain", "start")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.compiled: Any = compile_pattern(pattern)
        self.plain = is_plain(pattern)
        self.start = 0
        """Stays 0 for a pattern that is not plain: what comes later may turn anything into a match."""


class _PatternSearch:
    """Searches patterns in text that grows. Plain ones go on where the last search left a match unfinished."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._watches = [_Watch(pattern) for pattern in patterns]
        self._text = ""
        """The certain text from character `_base` on."""
        self._base = 0
        self._tail = ""
        self._searched = False
        """Whether the text as it stands was searched."""
        self._allowed = SEARCH_SECONDS

    def append(self, piece: str, tail: str, fresh: int, armed: bool) -> Match | None:
        """Take new text; the first match in all of it."""
        if piece or tail != self._tail:
            self._text += piece
            self._tail = tail
            self._searched = False
        self._allowed += SEARCH_SECONDS_PER_TOKEN
        if self._searched or not armed:
            return None
        self._searched = True
        found = [(m.start(), order, m) for order, w in enumerate(self._watches) if (m := self._search(w)) is not None]
        if not found:
            self._trim()
            return None
        _, order, match = min(found, key=lambda item: item[:2])
        begin, end = self._base + match.start(), self._base + match.end()
        return Match(begin, end, fresh, "regex", self._watches[order].pattern, match.group())

    def _search(self, watch: _Watch) -> Any:
        """The leftmost match, with places in `_text`; moves the watch on where there is none."""
        # What the text would be if it ended here cannot say where a match may begin once it goes on.
        partial = watch.plain and not self._tail
        began = time.thread_time()
        try:
            match = watch.compiled.search(
                self._text + self._tail, watch.start - self._base, partial=partial, timeout=max(self._allowed, 1e-6)
            )
        except TimeoutError:
            raise RowError(
                ErrorCode.INVALID_FIELD,
                f"`stop_regex` {show(watch.pattern)} takes too long to search in this row's output; simplify it "
                "(repeats within repeats, such as (a+)+, may take forever)",
                "stop_regex",
            ) from None
        self._allowed -= time.thread_time() - began
        if match is not None and not match.partial:
            return match
        if partial:
            watch.start = self._base + (len(self._text) if match is None else match.start())
        return None

    @property
    def settled(self) -> int:
        """Characters of the text in which no match can begin any more: none while a pattern is not plain."""
        return min(watch.start for watch in self._watches)

    def _trim(self) -> None:
        """Drop text that no pattern needs any more."""
        unused = min(watch.start for watch in self._watches) - self._base
        if unused >= _TRIM:
            self._text = self._text[unused:]
            self._base += unused


def _shared_length(old: str, new: str) -> int:
    """Length of the longest common beginning. `old` is a tail, mostly empty: short."""
    if new.startswith(old):
        return len(old)
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
