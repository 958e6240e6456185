"""Texts of prompts to token ids: many short ones in a call, long ones in pieces and as far as the context may need.

A tokenizer takes some hundred bytes of memory for each byte of text. A long text is therefore cut where its tokens are
those of the parts: between a word and the space or punctuation behind it, if the tokens around the place are the same
with and without the cut. Pieces are tokenised until they fill the context, from the side that is kept. A text that is
too long for the context is thus never tokenised as a whole, and what is kept of it has the ids that it has in the whole
text. A long stretch without such a place, as of one letter or of spaces, is cut somewhere once it exceeds the context
by far. If the end of the text is kept, the tokens behind that cut may be grouped otherwise than in the whole text, as
far as the stretch goes, and so in what is kept.

A prompt that is text is tokenized together with a text to score (`completion`, `completions`). The prompt ends with the
last token that ends inside it: a token that straddles the border belongs to the text to score. Ids given by the row are
concatenated unchanged, and so is text after a prompt of ids.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from threading import Event
from typing import Final, Literal, NamedTuple, TypeVar

from batchgen.errors import ErrorCode, ErrorInfo, RowError, apart, row_error
from batchgen.request.checks import TokenIds
from batchgen.request.fields.media_items import PlacedItem
from batchgen.request.fields.prompts import ChatPrompt, Prompt, StoredPrompt, TextPrompt, TokenPrompt, placed_items
from batchgen.request.table.request_table import ParsedRow
from batchgen.text.fit import Truncate
from batchgen.text.placing import expanded_ids, expanded_text, feature_count
from batchgen.text.tokens.tokenizer import Tokenizer

_BATCH_ROWS: Final = 256
_BATCH_CHARACTERS: Final = 1 << 21  # a batch of long texts ends early, so that the encodings of two batches stay small

CALL_CHARACTERS: Final = 1 << 20
"""Characters after which no further text is added to a call of the tokenizer."""
ROW_TEXT_BYTES: Final = 1 << 24
"""Most bytes of UTF-8 that the prompts of one row may have in all, each counted as far as it is looked at first."""
PIECE_CHARACTERS: Final = 1 << 18
"""Characters of a piece of a long text, if a place to cut is near."""
UNCUT_CHARACTERS: Final = 1 << 20
"""Longest stretch of text without a place to cut, in characters."""
_LEAST_PIECE: Final = 1 << 14
_CHARACTERS_PER_TOKEN: Final = 8
"""Characters for which a text that fills the context has a token at least, most likely."""
_PLACE: Final = re.compile(r"(?<=[^\W_])(?=[\s.,;:!?()\[\]\"、。，])")
_FAR: Final = 2
"""Multiple of the context that exceeds it by far: no other cut of the same text has half as many tokens."""
_AROUND: Final = 64
"""Characters on each side of a cut whose tokens are compared with and without it."""
_TRIED: Final = 256
"""Places of a stretch of text that are tried."""


_Tag = TypeVar("_Tag")
"""What the caller passes along with a row."""

Side = Literal["start", "end"]


class LongText(NamedTuple):
    """A text that is tokenised in pieces, from the side that truncation keeps."""

    text: str
    side: Side


class TextPart(NamedTuple):
    """The part of a text that was tokenised."""

    text: str
    ids: list[int]
    is_whole: bool
    """Whether it is the whole text."""


TokenizerInput = str | list[int] | TokenIds | ErrorInfo | LongText
"""A prompt before tokenization: text, ids given by the row, or the error of a text that cannot be used."""
Encoded = list[int] | TokenIds | ErrorInfo | TextPart
"""A prompt after it: all ids, an error, or those of a part of a long text."""


class _Cut(NamedTuple):
    """A place to cut a text: the first part ends at `end`, the other begins at `begin`, behind a space or at `end`."""

    end: int
    begin: int


class LongTexts:
    """Tokenises long texts for a context of `context` tokens."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self.piece = min(PIECE_CHARACTERS, max(_LEAST_PIECE, _CHARACTERS_PER_TOKEN * context))
        """Most characters of a text that is not long."""

    def part(self, text: str, side: Side) -> TextPart:
        """The part of a text at one side with at least as many tokens as the context, or the whole text.

        Where the text can be cut, the ids are those that the part has in the whole text. Else those at its other side
        may be others, which are not kept; at the end of a text they may be others as far as the stretch without a place
        to cut goes, since tokens are grouped from its beginning.

        The ids of a part at the end begin with the tokenizer's BOS if those of the whole text do.

        Raises:
            RowError: `context_length_exceeded`: the text has a stretch of `UNCUT_CHARACTERS` that cannot be cut.
            Exception: the tokenizer refuses the text.
        """
        if len(text) <= self.piece:
            return TextPart(text, self._encode(text), True)
        return self._start(text) if side == "start" else self._end(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain([text])[0]

    def _start(self, text: str) -> TextPart:
        ids: list[int] = []
        begin = 0
        while len(text) - begin > self.piece:
            cut = self._cut_after(text, begin, len(ids))
            ids += self._encode(text[begin : cut.end])
            begin = cut.begin
            if len(ids) >= self._context:
                return TextPart(text[: cut.end], ids, begin == len(text))
        return TextPart(text, ids + self._encode(text[begin:]), True)

    def _end(self, text: str) -> TextPart:
        bos = self._tokenizer.prefix_ids
        pieces: list[list[int]] = []
        end, count = len(text), 0
        while end > self.piece:
            cut = self._cut_before(text, end, count)
            pieces.append(self._encode(text[cut.begin : end]))
            count += len(pieces[-1])
            end = cut.end
            if count >= self._context and end:
                head = self._encode(text[:_AROUND])[: len(bos)]
                ids = [token for piece in reversed(pieces) for token in piece]
                return TextPart(text[cut.begin :], (bos if head == bos else []) + ids, False)
        if end:
            pieces.append(self._encode(text[:end]))
        return TextPart(text, [token for piece in reversed(pieces) for token in piece], True)

    def _cut_after(self, text: str, begin: int, count: int) -> _Cut:
        """A cut of the piece that begins at `begin`; the end of the text if the rest has none and is short enough.

        A piece without a place to cut is cut anywhere if it and the `count` tokens in front of it exceed the context by
        far.
        """
        limit = begin + UNCUT_CHARACTERS
        for start in range(begin + self.piece, min(limit, len(text)), self.piece):
            if (cut := self._first_cut(text, start, min(start + self.piece, limit))) is not None:
                return cut
            if self._exceeds(text[begin:start], count):
                return _Cut(start, start)
        if len(text) <= limit:
            return _Cut(len(text), len(text))
        raise _uncut(text, begin)

    def _cut_before(self, text: str, end: int, count: int) -> _Cut:
        """As `_cut_after`, for the piece that ends at `end`."""
        limit = end - UNCUT_CHARACTERS
        for stop in range(end - self.piece, max(limit, 0), -self.piece):
            if (cut := self._first_cut(text, max(stop - self.piece, limit, 0), stop)) is not None:
                return cut
            if self._exceeds(text[stop:end], count):
                return _Cut(stop, stop)
        if limit <= 0:
            return _Cut(0, 0)
        raise _uncut(text, limit)

    def _first_cut(self, text: str, start: int, stop: int) -> _Cut | None:
        cuts = (self._checked(text, match.start()) for match in islice(_PLACE.finditer(text, start, stop), _TRIED))
        return next((cut for cut in cuts if cut is not None), None)

    def _exceeds(self, piece: str, count: int) -> bool:
        pieces = len(piece) // self.piece
        is_last = len(piece) + self.piece >= UNCUT_CHARACTERS
        looks = pieces & (pieces - 1) == 0 or is_last  # at doubled lengths, not at every one: it takes time
        return looks and count + len(self._encode(piece)) >= _FAR * self._context

    def _checked(self, text: str, place: int) -> _Cut | None:
        """A cut at `place` that changes no token near it; None if there is none."""
        before = text[max(0, place - _AROUND) : place]
        whole = self._encode(text[max(0, place - _AROUND) : place + _AROUND])
        for begin in self._beginnings(text, place):
            if self._encode(before) + self._encode(text[begin : place + _AROUND]) == whole:
                return _Cut(place, begin)
        return None

    def _beginnings(self, text: str, place: int) -> Iterator[int]:
        """Where the second part may begin: some tokenizers put the space in front of it themselves, or drop it."""
        yield place
        if text[place] == " ":
            yield place + 1


def _uncut(text: str, begin: int) -> RowError:
    problem = (
        f"the prompt has {len(text)} characters, of which {UNCUT_CHARACTERS} from character {begin} on hold no place "
        "between words where it could be cut to be tokenised in parts; shorten it"
    )
    return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, problem)


class PromptTexts:
    """Tokenises the prompts of rows.

    Args:
        tokenizer: the model's tokenizer.
        context: the model's context.
        truncate: side on which prompts that are too long are cut.
        fim: whether prompts with a suffix are laid out for fill-in-the-middle.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, truncate: Truncate, *, fim: bool) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self.long = LongTexts(tokenizer, context)
        """Encoder of long texts."""
        self._side: Side = "end" if truncate == "left" else "start"
        self._fim_side: Side = "end" if fim and truncate != "none" else self._side  # the end is next to the middle

    def inputs(self, rows: Iterable[ParsedRow]) -> list[TokenizerInput]:
        """What to tokenise of each prompt of `rows`, in order; conversations are rendered."""
        rows = list(rows)
        chats = [prompt for row in rows for prompt in row.prompts if isinstance(prompt, ChatPrompt)]
        rendered = iter(apart(chats, self._tokenizer.render_chats, "the chat template"))
        inputs: list[TokenizerInput] = []
        for row in rows:
            before = len(inputs)
            for prompt in row.prompts:
                is_chat = isinstance(prompt, ChatPrompt)
                content: TokenizerInput = next(rendered) if is_chat else _given(prompt)
                if items := placed_items(prompt):
                    content = self._with_items(content, items)
                elif type(content) is str and len(content) > self.long.piece:
                    has_suffix = row.params.suffix is not None and not is_chat
                    content = LongText(content, self._fim_side if has_suffix else self._side)
                inputs.append(content)
            if len(row.prompts) > 1 and sum(map(self._bytes, inputs[before:])) > ROW_TEXT_BYTES:
                inputs[before:] = [_TOO_MUCH_TEXT] * len(row.prompts)
        return inputs

    def _with_items(self, content: TokenizerInput, items: Sequence[PlacedItem]) -> TokenizerInput:
        """A prompt's text or ids with what its images and sounds become."""
        try:
            feature_count(items, self._context)
            if isinstance(content, str):
                return expanded_text(content, items)
            return expanded_ids(content, items, self._tokenizer) if isinstance(content, list | array) else content
        except RowError as error:
            return error.info

    def _bytes(self, content: TokenizerInput) -> int:
        text = content.text[: self.long.piece] if isinstance(content, LongText) else content
        return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0

    def encode(self, inputs: Sequence[TokenizerInput], started: Event) -> list[Encoded]:
        """Tokenize the texts among `inputs`, nothing added; others are returned unchanged.

        `started` is set when the work begins.
        """
        started.set()
        short = [text for text in inputs if isinstance(text, str)]
        encoded = iter([ids for call in calls(short) for ids in self._encode_call(call)])
        return [
            next(encoded) if isinstance(text, str) else self._encode_part(text) if isinstance(text, LongText) else text
            for text in inputs
        ]

    def _encode_call(self, texts: Sequence[str]) -> list[list[int] | ErrorInfo]:
        try:
            return list(self._tokenizer.encode_plain(texts))
        except Exception as error:
            if len(texts) == 1:
                return [row_error(error, "tokenizing the prompt")]
            return [ids for text in texts for ids in self._encode_call([text])]  # find out which text fails

    def _encode_part(self, text: LongText) -> TextPart | ErrorInfo:
        try:
            return self.long.part(*text)
        except Exception as error:
            return row_error(error, "tokenizing the prompt")


_TOO_MUCH_TEXT: Final = ErrorInfo(
    ErrorCode.INVALID_FIELD,
    f"the row's prompts have more than {ROW_TEXT_BYTES >> 20} MiB of text in all; give them in several rows",
)


def calls(texts: Sequence[str], further: int = 0) -> Iterator[Sequence[str]]:
    """`texts` in runs for one call of the tokenizer each; `further`: characters that are added to each text."""
    first, characters = 0, 0
    for index, text in enumerate(texts):
        characters += len(text) + further
        if characters > CALL_CHARACTERS:
            yield texts[first : index + 1]
            first, characters = index + 1, 0
    if first < len(texts):
        yield texts[first:]


def _given(prompt: Prompt) -> str | list[int] | TokenIds:
    """The text to tokenize, or the ids given by the row."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    assert isinstance(prompt, StoredPrompt), "conversations are rendered and embeddings stored before this"
    return [0] * prompt.length


def next_batch(
    source: Iterator[tuple[_Tag, ParsedRow | None]],
) -> tuple[list[tuple[_Tag, ParsedRow | None]], int]:
    """The next rows of `source`, up to a bounded number of rows and characters, and the number of characters."""
    batch: list[tuple[_Tag, ParsedRow | None]] = []
    characters = 0
    for item in islice(source, _BATCH_ROWS):
        batch.append(item)
        row = item[1]
        if row is not None:
            characters += characters_of(row)
        if characters >= _BATCH_CHARACTERS:
            break
    return batch, characters


def characters_of(row: ParsedRow) -> int:
    """Characters of a row's prompts and carried fields; what is in lists and objects is left out."""
    count = sum(len(value) for value in row.extra.values() if type(value) is str) if row.extra else 0
    for prompt in row.prompts:
        if isinstance(prompt, TextPrompt):
            count += len(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            count += sum(len(text) for each in prompt.messages if type(text := each.get("content")) is str)
        elif isinstance(prompt, TokenPrompt):
            count += len(prompt.ids)
    return count


class PromptWithText(NamedTuple):
    """Token ids of a prompt and a text to score, without the BOS that the tokenizer adds."""

    ids: list[int]
    start: int
    """Index in `ids` of the first token to score."""


def join_texts(
    tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], texts: Sequence[str | tuple[int, ...]]
) -> Iterator[PromptWithText]:
    """The prompt followed by each of the texts, in order; texts are tokenised some at a time.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's text; None for a prompt given as ids.
        prompt_ids: ids of the prompt alone.
        texts: texts to score, as strings or ids.

    Raises:
        RowError: `invalid_field` for a text that has no tokens or cannot be tokenized.
    """
    name = scored_field(texts)
    encoded = _encoded(tokenizer, prompt, prompt_ids, [text for text in texts if isinstance(text, str)])
    for text in texts:
        try:
            joined = next(encoded) if isinstance(text, str) else PromptWithText([*prompt_ids, *text], len(prompt_ids))
        except Exception as error:  # the Rust side raises plain Exception
            raise RowError(
                ErrorCode.INVALID_FIELD, f"`{name}` cannot be tokenized: {error.__cause__ or error}", name
            ) from None
        if joined.start == len(joined.ids):
            problem = f"`{name}` holds a text without tokens; give it some or drop it"
            raise RowError(ErrorCode.INVALID_FIELD, problem, name)
        yield joined


def _encoded(
    tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], strings: Sequence[str]
) -> Iterator[PromptWithText]:
    for call in calls(strings, len(prompt or "")):
        if prompt is None:
            yield from (PromptWithText(prompt_ids + ids, len(prompt_ids)) for ids in tokenizer.encode_plain(call))
        else:
            yield from (PromptWithText(ids, start) for ids, start in tokenizer.encode_continuations(prompt, call))


def scored_field(texts: Sequence[str | tuple[int, ...]]) -> str:
    """Name of the row's field that holds the texts to score."""
    return "completion" if len(texts) == 1 else "completions"
