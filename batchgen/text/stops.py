"""Stop conditions of a sample, and its text once it has ended.

Rules (one `StopState` per sample receives each token once):

- A stop token id ends the sample at once. If it is an end-of-sequence id the kind is `eos`, even if the row names it
  too. `ignore_eos` disables the end-of-sequence ids, but not the ids that the row names.
- The text after k tokens is `Tokenizer.decode_output` of them under the row's options; the prompt's text never matches.
  A stop string matches at token k if an occurrence of it contains a character that token k added, and k is at least
  `min_new_tokens`: an occurrence completed before that never counts.
- Where `skip_special_tokens` leaves special tokens out of the text, the spelling of one in a stop string means
  the token: the string matches where the token is between the string's other characters. It may be spelled out, too.
- A pattern is searched in the text after each token from `min_new_tokens` on, as if the text ended there (so `$`
  matches after every token); its leftmost match counts, wherever it is. Look-behind and `^` see the output's text
  alone. An incomplete character at the end, shown as U+FFFD, is left out of the search until later tokens complete or
  replace it, or until the sample's last token: the last allowed one, or a stop token id.
- Of several matches completed by one token, the one that begins first wins, then list order, strings before patterns.
  A stop token id begins where its text begins, and wins a tie.
- The text ends where the match begins, or after the match with `no_stop_trim`.
- Patterns have a limit of processor time; a sample that exceeds it ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.request.completion import FinishReason, StopKind
from batchgen.request.params import SamplingParams
from batchgen.text.detokenize import Detokenizer
from batchgen.text.hidden_stops import hidden_strings
from batchgen.text.stop_search import StopSearch
from batchgen.text.tokenizer import Tokenizer


def all_stop_token_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end a sample with these parameters, which `min_new_tokens` masks at first."""
    if not params.stop_token_ids:
        return frozenset() if params.ignore_eos else eos_ids
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_ids.union(params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class StopEvent:
    """The stop condition that ended a sample."""

    kind: StopKind
    matched_stop: str
    """The stop string, the pattern, or the token id in decimal."""
    matched_text: str
    """Text of the match; for a token id, its token decoded alone."""
    cut: int | None = None
    """Number of characters of the text to keep; None for a token id, where the text follows from the tokens kept."""


@dataclass(frozen=True, slots=True)
class FinishedText:
    """Text of a finished sample and the result columns that say how it ended."""

    text: str
    finish_reason: FinishReason
    stop_kind: StopKind | None = None
    matched_stop: str | None = None
    matched_text: str | None = None


class StopState:
    """Stop conditions of one sample. Without strings and patterns each token costs one set look-up."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._stop_token_ids = all_stop_token_ids(params, eos_ids)
        self._tokenizer = tokenizer
        self._search = self._new_search() if params.stop or params.stop_regex or params.stream else None
        self.output_ids: list[int] = []
        """[C] token ids so far, including the one that stopped the sample."""
        self.event: StopEvent | None = None
        """Set when a token ends the sample; nothing may be appended afterwards."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Token ids that end the sample."""
        return self._stop_token_ids

    @property
    def tracks_text(self) -> bool:
        """Whether the text after each token matters; if not, only the last token may stop the sample."""
        return self._search is not None

    def _new_search(self) -> StopSearch:
        params = self._params
        detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
        hidden = hidden_strings(self._tokenizer, params.stop) if params.stop and params.skip_special_tokens else None
        return StopSearch(params.stop, params.stop_regex, detokenizer, hidden)

    def append(self, token: int, last: bool = False) -> StopEvent | None:
        """Add the next token; return the event if it ends the sample. `last`: no more tokens are allowed.

        Raises:
            RowError: `invalid_field`: the row's patterns take too long.
        """
        assert self.event is None, "the sample has ended"
        self.output_ids.append(token)
        stops = token in self._stop_token_ids
        if self._search is None and not stops:
            return None
        can_stop = len(self.output_ids) >= self._params.min_new_tokens
        match = self._search.append(token, can_stop, last or stops) if self._search is not None else None
        if match is not None and not (stops and match.begin >= match.fresh):
            cut = match.end if self._params.no_stop_trim else match.begin
            self.event = StopEvent(match.kind, match.stop, match.text, cut)
        elif stops:
            kind: StopKind = "eos" if token in self._eos_ids else "token"
            self.event = StopEvent(kind, str(token), self._tokenizer.token_text(token))
        return self.event

    def next_output_text(self) -> str:
        """Text that has become final since the last call, for a row with `stream` that has not ended.

        No later token changes it, and no later stop cuts it.
        """
        assert self._search is not None, "rows with `stream` track text"
        return self._search.next_output_text()

    def finish(self, reason: FinishReason) -> FinishedText:
        """Text and finish columns; a stop condition that the last allowed token met takes precedence over `reason`."""
        event = self.event
        if event is None:
            return FinishedText(self.decode(self.output_ids), reason)
        if event.cut is not None and self._search is not None:
            text = self._search.text[: event.cut]
        else:
            text = self.decode(self.output_ids if self._params.no_stop_trim else self.output_ids[:-1])
        return FinishedText(text, "stop", event.kind, event.matched_stop, event.matched_text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` under the row's options."""
        params = self._params
        return self._tokenizer.decode_output(ids, params.skip_special_tokens, params.spaces_between_special_tokens)
