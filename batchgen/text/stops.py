"""What ends a sequence, and its text once it has ended.

Rules (one `StopState` per sample, told of each token once):

- An id that stops the row ends it at once. Where it belongs to the end-of-sequence set, the kind is `eos`, even if the
  row names it too. `ignore_eos` takes the set away, not the ids that the row names.
- The text after k tokens is `Tokenizer.decode` of those tokens under the row's switches; the prompt's text never
  matches. A stop string matches at token k if an occurrence of it holds a character that token k brought, and k is at
  least `min_new_tokens`: an occurrence completed before that never counts.
- Of several strings completed by one token, the one that begins first wins, then list order. A stop id begins where
  its own text does, and wins a tie.
- Text ends where the match begins, or just after it with `no_stop_trim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.params import SamplingParams
from batchgen.request import FinishReason, StopKind
from batchgen.text.detokenize import Detokenizer
from batchgen.text.tokenizer import Tokenizer

__all__ = ["FinishedText", "StopEvent", "StopState", "stopping_ids"]


def stopping_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Every id that ends a row with these parameters: what the min_new_tokens mask hides."""
    if not params.stop_token_ids:
        return frozenset() if params.ignore_eos else eos_ids
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_ids.union(params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class StopEvent:
    """Why a sequence ended by itself."""

    kind: StopKind
    matched_stop: str
    """The stop string, or the id in decimal."""
    matched_text: str
    """The text of the match; for an id, its token decoded alone."""
    cut: int | None = None
    """Characters of the text that stay; None for an id, whose text is that of the tokens that stay."""


@dataclass(frozen=True, slots=True)
class FinishedText:
    """The result columns that say how a sample ended."""

    text: str
    finish_reason: FinishReason
    stop_kind: StopKind | None = None
    matched_stop: str | None = None
    matched_text: str | None = None


@dataclass(frozen=True, slots=True)
class _Match:
    begin: int
    """First character of the match in the text."""
    fresh: int
    """First character that the last token brought."""
    stop: str


class _StringSearch:
    """Finds stop strings in text that grows by tokens, looking at no more than the new text and its surroundings."""

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer) -> None:
        self._stops = stops
        self._overlap = max(map(len, stops)) - 1
        self._detokenizer = detokenizer
        self._pieces: list[str] = []
        self._certain = 0
        """Length of the certain text, which is `_pieces` joined."""
        self._recent = ""
        """Its last `_overlap` characters: where a match that a new token completes may begin."""
        self._tail = ""

    def append(self, token: int, armed: bool) -> _Match | None:
        """Take a token; the match it completes, looked for only while `armed`."""
        piece = self._detokenizer.append(token)
        tail = self._detokenizer.tail
        shared = _shared_length(self._tail, piece + tail)
        match = self._find(piece + tail, shared) if armed else None
        if piece:
            self._pieces.append(piece)
            self._certain += len(piece)
            self._recent = (self._recent + piece)[-self._overlap :] if self._overlap else ""
        self._tail = tail
        return match

    def _find(self, text: str, shared: int) -> _Match | None:
        """The first match that ends in `text` past its first `shared` characters."""
        if len(text) <= shared:
            return None
        window = self._recent + text
        fresh = len(self._recent) + shared
        found = [
            (begin, order)
            for order, stop in enumerate(self._stops)
            if (begin := window.find(stop, max(0, fresh - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        begin, order = min(found)
        offset = self._certain - len(self._recent)
        return _Match(offset + begin, offset + fresh, self._stops[order])

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._pieces) + self._tail


def _shared_length(old: str, new: str) -> int:
    """Length of the longest common beginning. `old` is a tail, mostly empty: short."""
    if new.startswith(old):
        return len(old)
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


class StopState:
    """Watches one sample's tokens. A row without stop strings costs a set look-up per token and one decode in all."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._stopping = stopping_ids(params, eos_ids)
        self._tokenizer = tokenizer
        self._search = self._new_search() if params.stop else None
        self.output_ids: list[int] = []
        """[C] tokens so far, with the one that stopped the sample."""
        self.event: StopEvent | None = None
        """Set by the token that ended the sample; nothing may be appended after."""

    def _new_search(self) -> _StringSearch:
        params = self._params
        detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
        return _StringSearch(params.stop, detokenizer)

    def append(self, token: int) -> StopEvent | None:
        """Take the next token; the event if it ends the sample."""
        assert self.event is None, "the sample has ended"
        self.output_ids.append(token)
        stops = token in self._stopping
        if self._search is None and not stops:
            return None
        armed = len(self.output_ids) >= self._params.min_new_tokens
        match = self._search.append(token, armed) if self._search is not None else None
        if match is not None and not (stops and match.begin >= match.fresh):
            cut = match.begin + (len(match.stop) if self._params.no_stop_trim else 0)
            self.event = StopEvent("string", match.stop, match.stop, cut)
        elif stops:
            kind: StopKind = "eos" if token in self._eos_ids else "token"
            self.event = StopEvent(kind, str(token), self._tokenizer.token_text(token))
        return self.event

    def finish(self, reason: FinishReason) -> FinishedText:
        """The text and how it ended. A stop that came with the last allowed token is a stop, whatever `reason` says."""
        event = self.event
        if event is None:
            return FinishedText(self._decode(self.output_ids), reason)
        if event.cut is not None and self._search is not None:
            text = self._search.text[: event.cut]
        else:
            text = self._decode(self.output_ids if self._params.no_stop_trim else self.output_ids[:-1])
        return FinishedText(text, "stop", event.kind, event.matched_stop, event.matched_text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._params.skip_special_tokens, self._params.spaces_between_special_tokens)
