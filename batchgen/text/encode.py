"""From parsed rows to token ids, in batches: lengths, vocabulary and truncation are settled here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import Generic, Literal, NamedTuple, TypeVar

from batchgen.errors import ErrorCode, ErrorInfo, RowError
from batchgen.params import Constraint, SamplingParams, StateLimits
from batchgen.prompts import ChatPrompt, Prompt, StoredPrompt, TextPrompt, TokenPrompt
from batchgen.request import ParsedRow
from batchgen.rows import derive_seed
from batchgen.text.fim import FillInTheMiddle, find_fim
from batchgen.text.grammars import Grammars
from batchgen.text.scoring import join_texts, texts_field
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.words import bad_sequences

__all__ = ["Encoded", "EncodedPrompt", "Encoder", "Truncate"]

Truncate = Literal["none", "left", "right"]
_Source = str | list[int] | ErrorInfo
"""A prompt before it is tokenised: text, ids given as such, or a conversation that cannot be rendered."""

_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 23  # a batch of long texts ends early, so that two batches' encodings stay within some 100 MB
_ID_FIELDS = ("stop_token_ids", "allowed_token_ids", "token_ids_logprob")
_ROOM_WITHOUT_LIMIT = 128  # tokens kept free for the answer of a truncated prompt whose row sets no limit

_MOST_FITTING = 256  # parameter sets remembered as checked

_NO_STATES = StateLimits()


class EncodedPrompt(NamedTuple):
    """One prompt of a row, ready to plan."""

    prompt_index: int
    ids: list[int]
    max_new_tokens: int
    """Effective: clipped to the context."""
    seed: int
    """The row's own seed, or the one derived from the run's seed and the row's id."""
    params: SamplingParams
    """The row's; where its `suffix` stands in the prompt, without it and with the ids that end the middle."""
    embeds: StoredPrompt | None = None
    """For a prompt given as embeddings, for which `ids` has zeros: those that it begins with."""
    score_start: int = -1
    """Where the text to score begins in `ids`; -1: none is scored."""
    text_index: int = 0
    """Which of the prompt's texts to score this is."""


Encoded = tuple[ParsedRow, list[EncodedPrompt] | ErrorInfo]
"""A row with its prompts, or with what is wrong with it."""
_Other = TypeVar("_Other")
"""What stands among rows and is none, such as one that was refused."""


class _Batch(NamedTuple, Generic[_Other]):
    """Rows, and others among them, that are being tokenised."""

    items: list[ParsedRow | _Other]
    texts: list[_Source]
    """of the rows' prompts, in order"""
    ids: Future[list[list[int] | ErrorInfo]]
    """likewise"""


class Encoder:
    """Tokenises rows for one model.

    `vocab_size`, `context_length` and `limits` are the model's. Truncation happens only where a prompt leaves no room
    for a token: it is then cut to leave room for `max_new_tokens` (128 where the row sets no limit), yet at most for
    half the context. `left` drops its beginning, `right` its end; a BOS in front of text or a conversation stays.

    Where a row has a `suffix` and the tokenizer's family fills in the middle, prompt and suffix are laid out as it was
    trained to read them; `left` then drops the beginning of the prompt first, `right` the end of the suffix.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        context_length: int,
        truncate: Truncate = "none",
        run_seed: int = 0,
        limits: StateLimits = _NO_STATES,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: where the rows' constraints are compiled, so that bad ones are known."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._may_exceed = tokenizer.vocab_size > vocab_size  # a text may have a token that the model does not know
        self._context = context_length
        self._truncate = truncate
        self._run_seed = run_seed
        self._fim = find_fim(tokenizer, vocab_size)
        self.grammars = grammars if grammars is not None else Grammars(tokenizer, vocab_size)
        self._words_checked: set[tuple[str | tuple[int, ...], ...]] = set()
        self._fitting: dict[int, SamplingParams] = {}
        self._limits = limits

    def encode_rows(self, rows: Iterable[ParsedRow | _Other]) -> Iterator[Encoded | tuple[_Other, None]]:
        """Each row, in order, with its prompts or with what is wrong; a bad prompt fails its whole row.

        What is no row comes back in its place, with None. Up to 256 are tokenised at a time, on a thread of its own
        while the next ones are taken.
        """
        source = iter(rows)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as tokenising:
            begun: list[_Batch[_Other]] = []
            while items := _take_batch(source):
                begun.append(self._begin_batch(items, tokenising))
                if len(begun) > 1:
                    yield from self._finish_batch(begun.pop(0))
            for batch in begun:
                yield from self._finish_batch(batch)

    def can_compile(self, constraints: Sequence[Constraint]) -> bool:
        """Prepare constraints that an earlier process found good; False: one is not, here."""
        self.grammars.prepare(constraints)
        return all(self.grammars.error(constraint) is None for constraint in constraints)

    def _begin_batch(self, items: list[ParsedRow | _Other], tokenising: Executor) -> _Batch[_Other]:
        rows = [item for item in items if isinstance(item, ParsedRow)]
        prompts = [prompt for row in rows for prompt in row.prompts]
        rendered = iter(self._tokenizer.render_chats([prompt for prompt in prompts if isinstance(prompt, ChatPrompt)]))
        texts = [next(rendered) if isinstance(prompt, ChatPrompt) else _source(prompt) for prompt in prompts]
        begun = Event()
        ids = tokenising.submit(self._encode_texts, texts, begun)
        begun.wait()  # else it would wait for this thread to let go of the interpreter, 5 ms: most of a batch's time
        distinct = {id(row.params): row.params for row in rows}.values()  # rows asked alike share the object
        constraints = [constraint for params in distinct if (constraint := params.constraint) is not None]
        if constraints:
            self.grammars.prepare(constraints)
        return _Batch(items, texts, ids)

    def _finish_batch(self, batch: _Batch[_Other]) -> Iterator[Encoded | tuple[_Other, None]]:
        found = zip(batch.texts, batch.ids.result(), strict=True)
        for item in batch.items:
            if not isinstance(item, ParsedRow):
                yield item, None
                continue
            own = list(islice(found, len(item.prompts)))
            try:
                finish = self._finish_scores if item.completions else self._finish_row
                yield item, finish(item, own)
            except RowError as error:
                yield item, error.info

    def _encode_texts(self, texts: Sequence[_Source], begun: Event) -> list[list[int] | ErrorInfo]:
        """Tokenise the strings among `texts` in one call, nothing added in front; the others stay as they are.

        `begun` is set at once.
        """
        begun.set()
        strings = [text for text in texts if isinstance(text, str)]
        try:
            encoded = iter(self._tokenizer.encode_plain(strings) if strings else [])
        except Exception:  # one text in the batch that the tokenizer cannot take: find out which
            return [self._encode_one(text) if isinstance(text, str) else text for text in texts]
        return [next(encoded) if isinstance(text, str) else text for text in texts]

    def _encode_one(self, text: str) -> list[int] | ErrorInfo:
        try:
            return self._tokenizer.encode_plain([text])[0]
        except Exception as error:  # the Rust side raises plain Exception
            return ErrorInfo(ErrorCode.INVALID_FIELD, f"the prompt cannot be tokenised: {error}")

    def _finish_scores(self, row: ParsedRow, found: list[tuple[_Source, list[int] | ErrorInfo]]) -> list[EncodedPrompt]:
        """Each prompt with each of the row's texts behind it."""
        given = [token for text in row.completions if not isinstance(text, str) for token in text]
        if given and max(given) >= self._vocab_size:
            raise self._out_of_range(texts_field(row.completions), max(given))
        encoded = []
        for index, (prompt, (source, ids)) in enumerate(zip(row.prompts, found, strict=True)):
            if isinstance(ids, ErrorInfo):
                raise RowError(ids.code, ids.message, ids.param)
            text = source if isinstance(source, str) else None
            for number, joined in enumerate(join_texts(self._tokenizer, text, ids, row.completions)):
                whole = self._complete(row, prompt, joined.ids)
                start = joined.start + len(whole) - len(joined.ids)
                if start == 0:
                    param = _source_of(row, prompt)
                    message = f"`{param}` has no token of its own before the text to score; begin it with more text"
                    raise RowError(ErrorCode.EMPTY_PROMPT, message, param)
                fitted = self._fit_scored(prompt, whole, start)
                embeds = self._embeds(prompt, len(fitted))
                both = fitted + whole[start:]
                encoded.append(EncodedPrompt(index, both, 0, 0, row.params, embeds, len(fitted), number))
        return encoded

    def _finish_row(self, row: ParsedRow, found: list[tuple[_Source, list[int] | ErrorInfo]]) -> list[EncodedPrompt]:
        params = row.params
        seed = params.seed if params.seed is not None else derive_seed(self._run_seed, row.id)
        if id(params) not in self._fitting:
            self._check_params(params)
            self._remember(params)
        encoded = []
        for index, (prompt, (_, ids)) in enumerate(zip(row.prompts, found, strict=True)):
            if isinstance(ids, ErrorInfo):
                raise RowError(ids.code, ids.message, ids.param)
            if isinstance(prompt, StoredPrompt):
                _refuse_beside_embeds(params)
            if params.suffix is not None and self._fim is not None and not isinstance(prompt, ChatPrompt):
                fitted = self._fill(self._fim, row, prompt, ids, params.suffix)
                chosen = self._fim.params(params)
            else:
                fitted, chosen = self._fit(prompt, self._complete(row, prompt, ids), params.max_new_tokens), params
            if params.logprob_start_len > len(fitted):
                problem = f"must not exceed the prompt's {len(fitted)} tokens, got {params.logprob_start_len}"
                raise RowError(ErrorCode.INVALID_FIELD, f"`logprob_start_len` {problem}", "logprob_start_len")
            room = self._context - len(fitted)
            limit = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
            if params.reads_prompt:
                self._limits.check(params, len(fitted), limit)
            encoded.append(EncodedPrompt(index, fitted, limit, seed, chosen, self._embeds(prompt, len(fitted))))
        return encoded

    def _embeds(self, prompt: Prompt, kept: int) -> StoredPrompt | None:
        """The embeddings of which `kept` tokens are left after truncation."""
        return prompt.cut(kept, self._truncate) if isinstance(prompt, StoredPrompt) else None

    def _check_params(self, params: SamplingParams) -> None:
        """Ranges that only the model's vocabulary sets, and the constraint.

        Raises:
            RowError: `token_out_of_range`, `invalid_field`, or what is wrong with the constraint.
        """
        constraint = params.constraint
        problem_of = self.grammars.error(constraint) if constraint is not None else None
        if problem_of is not None:
            raise RowError(problem_of.code, problem_of.message, problem_of.param)
        for name in _ID_FIELDS:
            ids = getattr(params, name)
            if ids and max(ids) >= self._vocab_size:
                raise self._out_of_range(name, next(token for token in ids if token >= self._vocab_size))
        if params.logit_bias and params.logit_bias[-1][0] >= self._vocab_size:
            raise self._out_of_range("logit_bias", params.logit_bias[-1][0])
        if params.bad_words and params.bad_words not in self._words_checked:
            self._check_words(params.bad_words)
        if params.top_logprobs_num > self._vocab_size:
            problem = f"must not exceed the vocabulary ({self._vocab_size}), got {params.top_logprobs_num}"
            raise RowError(ErrorCode.INVALID_FIELD, f"`top_logprobs_num` {problem}", "top_logprobs_num")

    def _remember(self, params: SamplingParams) -> None:
        """Check no other row that shares these; they are kept, so that no other object gets their identity."""
        if len(self._fitting) >= _MOST_FITTING:
            self._fitting.clear()
        self._fitting[id(params)] = params

    def _check_words(self, words: tuple[str | tuple[int, ...], ...]) -> None:
        """Once for each distinct list.

        Raises:
            RowError: `token_out_of_range`, or `invalid_field` for a word without tokens.
        """
        odd = max((max(word) for word in words if not isinstance(word, str)), default=0)
        if odd >= self._vocab_size:
            raise self._out_of_range("bad_words", odd)
        bad_sequences(words, self._tokenizer, self._vocab_size)
        self._words_checked.add(words)

    def _complete(self, row: ParsedRow, prompt: Prompt, ids: list[int]) -> list[int]:
        """`ids` with the tokenizer's BOS where it belongs, held to the vocabulary.

        Raises:
            RowError: `empty_prompt` or `token_out_of_range`.
        """
        prefix = self._tokenizer.prefix_ids
        if isinstance(prompt, TextPrompt) and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if not ids:
            param = _source_of(row, prompt)
            message = f"`{param}` gives no tokens, and the tokenizer adds none; give a prompt that is not empty"
            raise RowError(ErrorCode.EMPTY_PROMPT, message, param)
        if (self._may_exceed or isinstance(prompt, TokenPrompt)) and max(ids) >= self._vocab_size:
            raise self._out_of_range(_source_of(row, prompt), max(ids))
        return ids

    def _out_of_range(self, param: str, token: int) -> RowError:
        message = f"`{param}` holds token {token}; the model's vocabulary ends at {self._vocab_size - 1}"
        return RowError(ErrorCode.TOKEN_OUT_OF_RANGE, message, param)

    def _fit(self, prompt: Prompt, ids: list[int], max_new_tokens: int | None) -> list[int]:
        """`ids`, truncated if they fill the context and truncation is allowed.

        Raises:
            RowError: `context_length_exceeded`, naming both numbers.
        """
        keep = self._keep(len(ids), max_new_tokens)
        if keep >= len(ids):
            return ids
        return self._cut(prompt, ids, keep)

    def _fit_scored(self, prompt: Prompt, ids: list[int], start: int) -> list[int]:
        """The prompt's part of `ids`, truncated if both exceed the context and truncation is allowed.

        Raises:
            RowError: `context_length_exceeded`, naming all numbers.
        """
        keep = self._context - (len(ids) - start)
        if start <= keep:
            return ids[:start]
        if self._truncate == "none" or keep < 1:
            message = (
                f"the prompt has {start} tokens, the text to score {len(ids) - start}, and the context is "
                f"{self._context}; shorten them, or allow --truncate left or right"
            )
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
        return self._cut(prompt, ids[:start], keep)

    def _cut(self, prompt: Prompt, ids: list[int], keep: int) -> list[int]:
        """`keep` of the ids, on the side that truncation leaves."""
        if self._truncate == "right":
            return ids[:keep]
        bos = self._tokenizer.prefix_ids
        given = isinstance(prompt, TokenPrompt | StoredPrompt)
        kept = bos if not given and ids[: len(bos)] == bos and len(bos) < keep else []
        return kept + ids[len(ids) - (keep - len(kept)) :]

    def _fill(self, fim: FillInTheMiddle, row: ParsedRow, prompt: Prompt, ids: list[int], suffix: str) -> list[int]:
        """The prompt around the hole between `ids` and `suffix`, truncated as `_fit` does.

        Raises:
            RowError: as `_complete` and `_fit`; also where the layout alone exceeds what a truncated prompt may have.
        """
        after = fim.suffix_ids(suffix)
        whole = self._complete(row, prompt, fim.prompt(ids, after, 0, "none"))
        keep = self._keep(len(whole), row.params.max_new_tokens)
        if keep >= len(whole):
            return whole
        bos = len(whole) - len(fim.prompt(ids, after, 0, "none"))
        fitted = self._complete(row, prompt, fim.prompt(ids, after, keep - bos, self._truncate))
        if len(fitted) > keep:
            raise self._too_long(len(whole), "shorten it")
        return fitted

    def _keep(self, count: int, max_new_tokens: int | None) -> int:
        """How many of a prompt's `count` tokens stay.

        Raises:
            RowError: `context_length_exceeded`, naming both numbers.
        """
        if count < self._context:
            return count
        if self._truncate == "none" or self._context < 2:
            raise self._too_long(count, "shorten it, or allow --truncate left or right")
        wanted = _ROOM_WITHOUT_LIMIT if max_new_tokens is None else max_new_tokens
        return self._context - max(1, min(wanted, self._context // 2))

    def _too_long(self, count: int, remedy: str) -> RowError:
        message = f"the prompt has {count} tokens and the context is {self._context}, which leaves no room"
        return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message} to generate; {remedy}")


def _source(prompt: Prompt) -> str | list[int]:
    """The text to tokenise, or the ids given as such."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, TokenPrompt):
        return list(prompt.ids)
    assert isinstance(prompt, StoredPrompt), "conversations are rendered, and the intake puts embeddings into the store"
    return [0] * prompt.length


def _source_of(row: ParsedRow, prompt: Prompt) -> str:
    """The field that a prompt came from."""
    if isinstance(prompt, ChatPrompt):
        return "messages"
    if row.dialect == "openai-completions":
        return "prompt"
    if isinstance(prompt, StoredPrompt):
        return "input_embeds"
    return "text" if isinstance(prompt, TextPrompt) else "input_ids"


def _refuse_beside_embeds(params: SamplingParams) -> None:
    """Refuse what has no meaning for a prompt without ids.

    Raises:
        RowError: `unsupported_field`.
    """
    asked = {
        "echo": params.echo,
        "suffix": params.suffix is not None,
        "logprob_start_len": params.return_logprob and params.logprob_start_len >= 0,
    }
    for name in (name for name, value in asked.items() if value):
        message = f"`{name}` needs a prompt of text or ids, which `input_embeds` is not; leave it out"
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, name)


def _take_batch(source: Iterator[ParsedRow | _Other]) -> list[ParsedRow | _Other]:
    batch: list[ParsedRow | _Other] = []
    characters = 0
    for item in islice(source, _BATCH_ROWS):
        batch.append(item)
        if isinstance(item, ParsedRow):
            characters += sum(len(prompt.text) for prompt in item.prompts if isinstance(prompt, TextPrompt))
        if characters >= _BATCH_CHARACTERS:
            break
    return batch
