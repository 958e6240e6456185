"""What ends a sequence, and its text once it has ended.

Rules (one `StopState` per sample, told of each token once):

- An id that stops the row ends it at once. Where it belongs to the end-of-sequence set, the kind is `eos`, even if the
  row names it too. `ignore_eos` takes the set away, not the ids that the row names.
- The text after k tokens is `Tokenizer.decode_output` of those tokens under the row's switches; the prompt's text never
  matches. A stop string matches at token k if an occurrence of it holds a character that token k brought, and k is at
  least `min_new_tokens`: an occurrence completed before that never counts.
- A pattern is searched in the text after each token from `min_new_tokens` on, as if the text ended there (so `$` holds
  after every token); its leftmost match counts, wherever it is. Look-behind and `^` see the output's text alone. A
  character at the text's end of which bytes are missing, for which U+FFFD stands there, is left out until they have
  come, or others instead, or the sample's last token is out: the last allowed one, or an id that stops it.
- Of several matches completed by one token, the one that begins first wins, then list order, strings before patterns.
  A stop id begins where its own text does, and wins a tie.
- Text ends where the match begins, or just after it with `no_stop_trim`.
- Patterns have a limit of time, in seconds of computing; a sample that takes longer ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.params import SamplingParams
from batchgen.request import FinishReason, StopKind
from batchgen.text.detokenize import Detokenizer
from batchgen.text.stop_search import StopSearch
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
    """The stop string, the pattern, or the id in decimal."""
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


class StopState:
    """Watches one sample. A row without strings and patterns costs a set look-up per token and one decode in all."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._stopping = stopping_ids(params, eos_ids)
        self._tokenizer = tokenizer
        self._search = self._new_search() if params.stop or params.stop_regex or params.stream else None
        self.output_ids: list[int] = []
        """[C] tokens so far, with the one that stopped the sample."""
        self.event: StopEvent | None = None
        """Set by the token that ended the sample; nothing may be appended after."""

    @property
    def stopping(self) -> frozenset[int]:
        """Every id that ends the sample."""
        return self._stopping

    @property
    def follows_text(self) -> bool:
        """Whether the text after each token counts; if not, no token but the last means anything to this object."""
        return self._search is not None

    def _new_search(self) -> StopSearch:
        params = self._params
        detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
        return StopSearch(params.stop, params.stop_regex, detokenizer)

    def append(self, token: int, last: bool = False) -> StopEvent | None:
        """Take the next token; the event if it ends the sample. `last`: the sample may have no more.

        Raises:
            RowError: `invalid_field`: the row's patterns take too long.
        """
        assert self.event is None, "the sample has ended"
        self.output_ids.append(token)
        stops = token in self._stopping
        if self._search is None and not stops:
            return None
        armed = len(self.output_ids) >= self._params.min_new_tokens
        match = self._search.append(token, armed, last or stops) if self._search is not None else None
        if match is not None and not (stops and match.begin >= match.fresh):
            cut = match.end if self._params.no_stop_trim else match.begin
            self.event = StopEvent(match.kind, match.stop, match.text, cut)
        elif stops:
            kind: StopKind = "eos" if token in self._eos_ids else "token"
            self.event = StopEvent(kind, str(token), self._tokenizer.token_text(token))
        return self.event

    def settled(self) -> str:
        """Text that has become final since the last call, for a row with `stream` that has not ended.

        No later token changes it, and no later stop cuts it.
        """
        assert self._search is not None, "text is followed where rows ask for it"
        return self._search.settled()

    def finish(self, reason: FinishReason) -> FinishedText:
        """The text and how it ended. A stop that came with the last allowed token is a stop, whatever `reason` says."""
        event = self.event
        if event is None:
            return FinishedText(self.text_of(self.output_ids), reason)
        if event.cut is not None and self._search is not None:
            text = self._search.text[: event.cut]
        else:
            text = self.text_of(self.output_ids if self._params.no_stop_trim else self.output_ids[:-1])
        return FinishedText(text, "stop", event.kind, event.matched_stop, event.matched_text)

    def text_of(self, ids: Sequence[int]) -> str:
        """Text of `ids` under the row's switches."""
        params = self._params
        return self._tokenizer.decode_output(ids, params.skip_special_tokens, params.spaces_between_special_tokens)
