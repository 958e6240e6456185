"""Thoughts and answer of an output: which tokens belong to which, found token by token. No model is needed.

Rules (one `ReasoningState` per sample receives each token once):

- A marker that is an added token of the vocabulary is found by its id, any other in the text with special tokens shown.
- An output begins with thoughts if its prompt ends inside them: behind the last special token of the prompt is a start
  marker that no end marker follows.
- Else thoughts begin at a start marker with nothing but blanks in front of it, and end at the first end marker. What
  follows is the answer, whatever it quotes. In a format of channels, thoughts and answers may alternate.
- A marker that ends the answer is one at the output's end only, and only where a marker has begun the answer.
- In a format of channels a part is the answer's unless its channel is that of thoughts, and so is a call, with its
  head. What is in no part is the answer's, too.
- Tokens of markers belong to neither side. Other characters of a marker's first or last token belong to the text that
  they are in; where they cannot be cut, the answer has the whole token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, Literal

import regex

from batchgen.text.families import AUTO, OFF, ReasoningFormat, find_format, named_format, response_format
from batchgen.text.tokens.detokenize import Detokenizer
from batchgen.text.tokens.tokenizer import Tokenizer

Part = Literal["answer", "thoughts", "header"]
"""What a token belongs to; `header`: what is between two parts of a format of channels."""

_TAIL: Final = 4096
"""Tokens at a prompt's end among which its last special token is looked for."""
_NEAR: Final = 64
"""Tokens at the end of a prompt without special tokens among which a start marker is looked for."""


def reasoning_of(tokenizer: Tokenizer, wanted: str) -> ReasoningParser | None:
    """The parser of a model's thoughts; None if it has no format that is known. `wanted`: the option `--reasoning`.

    Raises:
        UsageError: no family has the wanted name.
    """
    if wanted == OFF:
        return None
    if wanted != AUTO:
        return ReasoningParser(named_format(wanted), tokenizer)
    template = tokenizer.template
    response = None if template is None else template.response_template
    form = None if response is None else response_format(response)
    if form is None:
        turns = "" if tokenizer.written is None else tokenizer.written.turns
        is_added = {tokenizer.id_to_token(token) for token in tokenizer.added_ids}.__contains__
        form = find_format(turns, tokenizer.template_reads, is_added)
    return None if form is None else ReasoningParser(form, tokenizer)


class ReasoningParser:
    """A format's markers as tokens of one vocabulary."""

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer) -> None:
        self.format = form
        self.tokenizer = tokenizer
        ids = {text: tokenizer.token_to_id(text) for text in form.markers}
        self.marker_ids = {token: text for text, token in ids.items() if token in tokenizer.added_ids}
        """Id -> the marker that it is."""
        self.by_id = len(self.marker_ids) == len(ids)
        """Whether each marker is one token."""
        self.encode = lru_cache(64)(self._encode)
        """Ids of a marker."""
        self.blank = lru_cache(1 << 12)(self._blank)
        """Whether a token has no text but blanks."""
        gaps = {self.encode(text): text for text in accumulate(form.gap)}
        self.gaps = {ids[0]: text for ids, text in gaps.items() if len(ids) == 1}
        """Tokens of what may be between thoughts and answer, with their texts."""

    def close_ids(self, *, calls: bool) -> tuple[int, ...]:
        """Ids of the text that ends the thoughts and begins the answer; `calls`: which must call a tool."""
        return self.encode(self.format.close(calls=calls))

    def opening_ids(self, *, calls: bool) -> tuple[tuple[int, ...], ...]:
        """Ids of each marker with which an output may begin: those of thoughts, and in channels those of answers.

        `calls`: whether an answer must call a tool.
        """
        form = self.format
        return tuple(map(self.encode, form.starts if form.header is None else form.next_parts(calls=calls)))

    def header_ids(self, *, calls: bool) -> tuple[tuple[int, ...], ...]:
        """Ids of the texts with which a format of channels goes on behind a part, without the end of that part.

        `calls`: whether an answer must call a tool.
        """
        form = self.format
        return tuple(self.encode(f"{form.header}{marker}") for marker in form.next_parts(calls=calls))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_plain([text])[0])

    def _blank(self, token: int) -> bool:
        return token in self.tokenizer.special_ids or not self.tokenizer.token_text(token).strip()

    @cached_property
    def _marker_tokens(self) -> frozenset[int]:
        added = self.tokenizer.added_ids
        return frozenset(token for text in self.format.markers for token in self.encode(text) if token in added)

    def _begun(self, prompt_ids: Sequence[int]) -> str:
        """What the last marker of a prompt begins: `thoughts`, `answer` or nothing."""
        form, added, markers = self.format, self.tokenizer.added_ids, self._marker_tokens
        tail: list[int] = []
        turn = False
        for token in reversed(prompt_ids[-_TAIL:]):
            if turn := token in added and token not in markers:
                break
            tail.append(token)
        if not turn:
            del tail[_NEAR:]
        text = self.tokenizer.decode(tail[::-1], skip_special_tokens=False)
        names = {"": form.ends, "answer": form.answers, "thoughts": form.starts}
        end, begun = max((_last(text, each), name) for name, each in names.items())
        # Without a special token in front of it, a marker with text behind it may be in another turn.
        if end < 0 or not (turn or not text[end:].strip()):
            return "thoughts" if form.opened else ""
        return begun

    def start(self, prompt_ids: Sequence[int]) -> ReasoningState:
        """The state of a sample after its prompt."""
        begun = self._begun(prompt_ids)
        return ReasoningState(self, inside=begun == "thoughts", wrapped=begun == "answer")


def _last(text: str, markers: Sequence[str]) -> int:
    """End of the last of `markers` in `text`; -1 if there is none."""
    return max((at + len(marker) for marker in markers if (at := text.rfind(marker)) >= 0), default=-1)


@lru_cache(maxsize=64)
def _tags(
    ends: tuple[str, ...], starts: tuple[str, ...], answers: tuple[str, ...], closers: tuple[str, ...]
) -> regex.Pattern[str] | None:
    """Pattern of these markers, in groups by what they begin. What ends the answer never matches in full."""
    texts = {"end": ends, "thoughts": starts, "answer": answers, "closer": closers}
    groups = [f"(?P<{name}>{'|'.join(map(regex.escape, each))})" for name, each in texts.items() if each]
    if closers:
        groups[-1] = rf"\s{{0,256}}{groups[-1]}\s{{0,256}}(?!)"
    return regex.compile("|".join(groups)) if groups else None


@lru_cache(maxsize=64)
def _channels(form: ReasoningFormat, *, in_head: bool, first: bool) -> regex.Pattern[str]:
    """Pattern of what begins and ends parts. `in_head`: inside the head of a call; `first`: in front of a part."""
    ends = f"(?P<end>{'|'.join(map(regex.escape, form.ends))})"
    if in_head:
        return regex.compile(f"(?P<body>{regex.escape(form.body)})|{ends}")
    bare = r"|^\s?(?P<call>to=)" if first and form.body else ""
    return regex.compile(f"{form.begins}|{ends}{bare}")


class ReasoningState:
    """What the tokens of one sample belong to."""

    def __init__(self, parser: ReasoningParser, *, inside: bool, wrapped: bool) -> None:
        """`inside`: the output begins with thoughts; `wrapped`: with an answer that a marker has begun."""
        self.parser = parser
        self._form = parser.format
        self.part: Part = "thoughts" if inside else "answer"
        self.begun = inside
        """Whether there are thoughts, though perhaps empty ones."""
        self.thinking_tokens = 0
        """Tokens of the thoughts so far, without markers."""
        self.answer_ids: list[int] = []
        """Tokens of the answer so far."""
        self.lead = self.trail = ""
        """Characters of the answer in the tokens of the markers in front of it and behind it."""
        self._blank = True
        """Whether the answer has no text but blanks yet."""
        self._marked = inside
        """Whether the answer is behind a marker, with blanks that belong to it."""
        self._wrapped = wrapped
        """Whether a marker has begun the answer, and so one may end it."""
        self._in_head = False
        """Whether the tokens are those of the head of a call."""
        self._thoughts: list[tuple[list[int], list[str]]] = [([], ["", ""])] if inside else []
        """Per stretch of thoughts: its tokens, and its characters in the tokens of the markers around it."""
        self._held: list[tuple[int, str]] = []
        """Tokens that may belong to a marker, with their texts."""
        self._count = 0
        """Number of tokens so far."""
        self._closing_from: int | None = None
        """Number of tokens in front of an end marker that is being written; None if it is the model's choice."""
        self._settled: list[int] = []
        """Tokens of the answer that the next call returns."""
        by_id = parser.by_id and parser.format.header is None
        self._shown = None if by_id else Detokenizer(parser.tokenizer, False, False)
        self._live = self._find_live()
        """Pattern of the markers that count next; None if none does."""

    def _find_live(self) -> regex.Pattern[str] | None:
        form, in_answer = self._form, self.part == "answer"
        if form.header is not None:
            return _channels(form, in_head=self._in_head, first=self.part == "header" or (in_answer and self._blank))
        if not in_answer:
            return _tags(form.ends, (), (), ())
        starts = () if self.begun or not self._blank else form.starts
        return _tags((), starts, form.answers if self._blank else (), form.closers if self._wrapped else ())

    @property
    def pending(self) -> int:
        """Number of tokens that may belong to a marker and are counted nowhere yet."""
        return len(self._held)

    def append(self, token: int) -> list[int]:
        """Add the next token; return the tokens that are now known to be the answer's, in order."""
        self._count += 1
        if self._live is None:
            self._add(token)
        elif self._shown is not None:
            self._held.append((token, self._shown.append(token)))
            self._search()
        elif token in self.parser.marker_ids or self._held or (self._wrapped and self.parser.blank(token)):
            other = " " if self.parser.blank(token) else "\0"  # what is in place of its text
            self._held.append((token, self.parser.marker_ids.get(token, other)))
            self._search()
        else:
            self._add(token)
        return self._take()

    def begin_closing(self) -> None:
        """Take the next tokens for the marker that ends the thoughts, even if it is not completed."""
        self._closing_from = self._count

    def end_search(self) -> None:
        """Take all tokens from here on, and the last ones that may belong to a marker, for the answer's."""
        self._settle()
        self._live = None

    def _settle(self) -> None:
        """Add the held tokens to the part that they are in, which has more than blanks then."""
        held, self._held = self._held, []
        for token, _ in held:
            self._add(token)
        if self.part == "answer" and self._blank:
            self._blank = False
            self._live = self._find_live()

    def flush(self) -> list[int]:
        """End the output; return the remaining tokens of the answer.

        What a special token begins of a marker of channels is in no part, though the marker is not complete. Nor is an
        end marker that is being written.
        """
        form, window = self._form, self._window
        if self._closing_from is not None and self.part == "thoughts":
            self._held = self._held[: max(0, self._closing_from - (self._count - len(self._held)))]
        match = None if self._live is None else self._live.search(window, partial=True)
        if match is not None and match.partial and window[match.start() :].strip() in form.closers:
            self.trail += window[self._release(match.start()) : match.start()]
            self._held.clear()
        elif form.header is not None and self._held and self._held[0][0] in self.parser.tokenizer.special_ids:
            rest = window.removeprefix(form.header)
            if any(text.startswith(rest) for text in (*form.markers, form.header)):
                self._held.clear()
        self._release(len(window))
        return self._take()

    @property
    def _window(self) -> str:
        return "".join(text for _, text in self._held)

    def _take(self) -> list[int]:
        taken, self._settled = self._settled, []
        return taken

    def _search(self) -> None:
        """Look for markers in the text of the held tokens, and release those that cannot belong to one."""
        while self._held and self._live is not None:
            live, window = self._live, self._window
            match = live.search(window, partial=True)
            if match is None or match.partial:
                self._release(len(window) if match is None else match.start())
                if self._live is live:
                    return
            else:
                self._begin(match, window)
        if self._held:
            self._settle()

    def _begin(self, match: regex.Match[str], window: str) -> None:
        """Begin the part behind a marker that is found in the text of the held tokens."""
        kind, channels, in_answer = match.lastgroup or "answer", self._form.header is not None, self.part == "answer"
        if in_answer and not channels and window[: match.start()].strip():
            self._settle()  # the answer has begun in the token that the marker begins in
            return
        at = self._release(match.start())
        self._marked |= self._blank
        self._in_head = kind == "call"
        if kind in ("call", "body"):  # a call's head is a part of the answer
            self.part = "answer"
            self._release(match.end() - at)
            self._settle()
            self._live = self._find_live()
            return
        if self.part == "thoughts":
            self._thoughts[-1][1][1] = window[at : match.start()]
        elif window[at : match.start()].strip():
            self._add(self._held[0][0])
        last = 0
        while at < match.end():
            last, text = self._held.pop(0)
            at += len(text)
        rest = window[match.end() : at]
        if kind == "thoughts":
            self.part, self.begun = "thoughts", True
            self._thoughts.append(([], [rest if rest.strip() else "", ""]))
        else:
            self.part = "header" if kind == "end" and channels else "answer"
            self._wrapped |= kind == "answer"
            if channels and rest.strip():
                self._add(last)
            elif rest.strip():
                self.lead, self._blank = self.lead + rest, False
        self._live = self._find_live()

    def _release(self, end: int) -> int:
        """Add the held tokens whose text ends at `end` or before; returns where the text of the others begins."""
        header, window = self._form.header, self._window
        skipped = len(header) if header and window.startswith(header) else 0
        at = 0
        while self._held and at + len(self._held[0][1]) <= end:
            token, text = self._held.pop(0)
            at += len(text)
            if not skipped or at > skipped:
                self._add(token)
        return at

    def _add(self, token: int) -> None:
        if self.part == "header" and not self.parser.blank(token):
            self.part = "answer"  # without a head
            self._marked |= self._blank
        if self.part == "thoughts":
            self._thoughts[-1][0].append(token)
            self.thinking_tokens += 1
        elif self.part == "answer":
            self.answer_ids.append(token)
            self._settled.append(token)
            if self._blank and self._live is not None and not self.parser.blank(token):
                self._blank = False
                self._live = self._find_live()

    def reasoning(self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str | None:
        """The thoughts so far, without blanks around them; None if there are none. Stretches are on separate lines."""
        options = skip_special_tokens, spaces_between_special_tokens
        stretches = [
            f"{before}{self.parser.tokenizer.decode_output(ids, *options)}{behind}".strip()
            for ids, (before, behind) in self._thoughts
        ]
        return "\n".join(filter(None, stretches)) or None

    def answer(self, text: str, *, cut: bool = False) -> str:
        """The answer whose tokens have this text, without the blanks behind the thoughts.

        `cut`: the text does not go on to the answer's end.
        """
        text = f"{self.lead}{text}{'' if cut else self.trail}"
        return text.lstrip() if self._marked else text
