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
- With `separate_reasoning`, all of this holds for the answer: its tokens are the text, in which strings, patterns and
  the ids that the row names match. An end-of-sequence id ends the sample inside the thoughts, too.
- Patterns have a limit of processor time; a sample that exceeds it ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.request.completion import FinishReason, StopKind
from batchgen.request.fields.params import SamplingParams
from batchgen.text.calls import ToolCall
from batchgen.text.reasoning import ReasoningState
from batchgen.text.stops.hidden_stops import hidden_strings
from batchgen.text.stops.search import StopSearch
from batchgen.text.tokens.detokenize import Detokenizer
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.parser import CallParser, shown_text


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
    reasoning: str | None = None
    """The thoughts; None if there are none, or if they are a part of the text."""
    reasoning_tokens: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the row's tools, which are not a part of the text."""
    tool_calls_error: str | None = None
    """Why something in the text that begins like a call is none."""


class StopState:
    """Stop conditions of one sample. Without strings and patterns each token costs one set look-up."""

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer,
        thoughts: ReasoningState | None = None,
    ) -> None:
        """`thoughts`: follows the sample's tokens, for a row that separates its thoughts or has a budget of them."""
        self._params = params
        self._thoughts = thoughts
        self._separates = thoughts is not None and bool(params.separate_reasoning)
        self._always_ends = frozenset() if params.ignore_eos else eos_ids
        """Ids that end the sample inside its thoughts, too."""
        self._eos_ids = eos_ids
        self.stop_token_ids = all_stop_token_ids(params, eos_ids)
        """Token ids that end the sample."""
        self._tokenizer = tokenizer
        self._search = self._new_search() if params.stop or params.stop_regex or params.stream else None
        self._followed = 0
        """Number of tokens that `thoughts` has received."""
        self._blanks: str | None = ""
        """Blanks at the beginning of the answer that `next_output_text` holds back; None behind them."""
        self.output_ids: list[int] = []
        """[C] token ids so far, including the one that stopped the sample."""
        self.event: StopEvent | None = None
        """Set when a token ends the sample; nothing may be appended afterwards."""

    @property
    def answer_ids(self) -> list[int]:
        """Tokens of the answer of a row that separates its thoughts, up to and including the one that stopped it."""
        assert self._thoughts is not None
        stopped = self.event is not None and self.event.cut is None and not self._params.no_stop_trim
        return [*self._thoughts.answer_ids, *(self.output_ids[-1:] if stopped else [])]

    @property
    def tracks_text(self) -> bool:
        """Whether the text after each token matters; if not, only the last token may stop the sample."""
        return self._search is not None or (self._separates and bool(self.stop_token_ids - self._always_ends))

    @property
    def needs_each_token(self) -> bool:
        """Whether it must receive each token in time; if not, it only needs the last one."""
        params = self._params
        has_mask = params.thinking_budget is not None or params.constraint is not None
        return self.tracks_text or (self._thoughts is not None and has_mask)

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
        stops = token in self.stop_token_ids and self._may_stop(token)
        tokens = [token] if self._thoughts is None else self._follow(token, stops=stops, last=last)
        if self._search is None and not stops:
            return None
        can_stop = len(self.output_ids) >= self._params.min_new_tokens
        match = None
        for number, each in enumerate(tokens if self._search is not None else (), 1):
            assert self._search is not None
            match = self._search.append(each, can_stop, (last or stops) and number == len(tokens))
            if match is not None:
                break
        if match is not None and not (stops and match.begin >= match.fresh):
            cut = match.end if self._params.no_stop_trim else match.begin
            self.event = StopEvent(match.kind, match.stop, match.text, cut)
        elif stops:
            kind: StopKind = "eos" if token in self._eos_ids else "token"
            self.event = StopEvent(kind, str(token), self._tokenizer.token_text(token))
        return self.event

    def _may_stop(self, token: int) -> bool:
        """Whether a stop id ends the sample at this place."""
        thoughts = self._thoughts
        return not self._separates or token in self._always_ends or (thoughts is None or thoughts.part == "answer")

    def _follow(self, token: int, *, stops: bool, last: bool) -> list[int]:
        """The tokens in which stops are searched now that `token` is added."""
        assert self._thoughts is not None
        if not self.needs_each_token:
            return [token]  # the others may come all at once
        if stops:  # it is not a part of the text, unless it is kept
            in_answer = self._thoughts.part == "answer"
            tokens = [*self._thoughts.flush(), token] if in_answer else []
        else:
            self._followed += 1
            tokens = self._thoughts.append(token)
            tokens += self._thoughts.flush() if last else []
        return tokens if self._separates else [token]

    def next_output_text(self) -> str:
        """Text that has become final since the last call, for a row with `stream` that has not ended.

        No later token changes it, and no later stop cuts it.
        """
        assert self._search is not None, "rows with `stream` track text"
        if self._params.tool_calls is not None:
            return ""  # any of it may turn out to be a call
        text = self._search.next_output_text()
        if not self._separates or self._blanks is None:
            return text
        assert self._thoughts is not None
        text = self._blanks + text
        if not text.strip():
            self._blanks = text
            return ""
        self._blanks = None
        return self._thoughts.answer(text, cut=True)

    def finish(self, reason: FinishReason) -> FinishedText:
        """Text and finish columns; a stop condition that the last allowed token met takes precedence over `reason`."""
        done = self._finished(reason)
        return done if self._params.tool_calls is None else self._with_calls(done)

    def _with_calls(self, done: FinishedText) -> FinishedText:
        """The finished text without its calls."""
        params, event, thoughts = self._params, self.event, self._thoughts
        assert params.tool_calls is not None
        ids, around = self._text_ids, ("", "")
        if self._separates and thoughts is not None:
            is_cut = event is not None and event.cut is not None
            ids, around = thoughts.answer_ids, (thoughts.lead, "" if is_cut else thoughts.trail)
        parser = CallParser.of(params.tool_calls)
        if not parser.may_call(f"{around[0]}{self._tokenizer.decode_output(ids, False, False)}{around[1]}"):
            return done  # soon, as most answers have no calls
        length = event.cut if event is not None else None
        answer = parser.parse(shown_text(self._tokenizer, ids, params, around, length), done.text)
        return replace(done, text=answer.text, tool_calls=answer.calls, tool_calls_error=answer.error)

    @property
    def _text_ids(self) -> list[int]:
        """The tokens so far, without a stop token that is not a part of the text."""
        trimmed = self.event is not None and self.event.cut is None and not self._params.no_stop_trim
        return self.output_ids[: len(self.output_ids) - trimmed]

    def _finished(self, reason: FinishReason) -> FinishedText:
        """As `finish`, with calls in the text."""
        event, thoughts, params, ids = self.event, self._thoughts, self._params, self._text_ids
        if self._separates and thoughts is not None:
            for token in ids[self._followed :]:
                thoughts.append(token)
            self._followed = len(self.output_ids)
            thoughts.flush()
            ids = thoughts.answer_ids
        cut = None if event is None else event.cut
        text = self.decode(ids) if cut is None or self._search is None else self._search.text[:cut]
        done = FinishedText(text, reason)
        if event is not None:
            done = FinishedText(text, "stop", event.kind, event.matched_stop, event.matched_text)
        if not self._separates or thoughts is None:
            return done
        return replace(
            done,
            text=thoughts.answer(text, cut=cut is not None),
            reasoning=thoughts.reasoning(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            reasoning_tokens=thoughts.thinking_tokens if thoughts.begun else None,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` under the row's options."""
        params = self._params
        return self._tokenizer.decode_output(ids, params.skip_special_tokens, params.spaces_between_special_tokens)
