"""Tokenization of parsed rows in batches: checks against the vocabulary, fill-in-the-middle."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from threading import Event
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from batchgen.errors import ErrorCode, ErrorInfo, RowError, row_error
from batchgen.request.checks import invalid, out_of_range
from batchgen.request.fields.constraint import Constraint
from batchgen.request.fields.hidden_states import CaptureSupport
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import (
    ChatPrompt,
    Prompt,
    StoredPrompt,
    TextPrompt,
    TokenPrompt,
    placed_items,
    refuse_with_embeds,
)
from batchgen.request.rows.parser import derive_seed
from batchgen.request.table.request_table import ParsedRow
from batchgen.request.tasks import TaskSupport
from batchgen.text.fit import FillInTheMiddle, Ids, PromptFitter, Truncate, find_fim
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.param_checks import check_params
from batchgen.text.placing import Ints, stored_ids
from batchgen.text.prompt_texts import (
    Encoded,
    LongText,
    PromptTexts,
    PromptWithText,
    TextPart,
    TokenizerInput,
    join_texts,
    next_batch,
    scored_field,
)
from batchgen.text.reasoning import ReasoningParser
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.rows import ToolParser, params_with_tools

SCORED_TOKENS = 1 << 24
"""Most tokens of all texts to score of a row, each counted with its prompt."""
_LARGE_CHARACTERS = 1 << 23  # while a larger batch is in memory, no other one is
_MAX_CHECKED = 256  # values that are remembered as checked
_NO_STATES = CaptureSupport()


class EncodedPrompt(NamedTuple):
    """One tokenized prompt of a row, ready to plan."""

    prompt_index: int
    ids: Ids
    max_new_tokens: int
    """Effective limit, clipped to the context length."""
    seed: int
    """The row's seed, or one derived from the run's seed and the row's id."""
    params: SamplingParams
    """The row's parameters; for a fill-in-the-middle prompt without `suffix` and with the stop ids of the family."""
    embeds: StoredPrompt | None = None
    """Stored embeddings of the prompt, in place of which `ids` has zeros; None for a prompt of ids."""
    score_start: int = -1
    """Index in `ids` of the first token to score; -1 if none is scored."""
    text_index: int = 0
    """Index of the text to score among the row's `completions`."""
    stored: Ints | None = None
    """Ids for the `RequestTable`, which names items by them; None: `ids`, since the prompt has no images or sounds."""


_Tag = TypeVar("_Tag")
"""What the caller passes along with a row."""
_Item = tuple[_Tag, ParsedRow | None]
"""A row with the caller's tag; None in place of a row that cannot be parsed, which only keeps its place."""


class _Batch(NamedTuple, Generic[_Tag]):
    """Rows that are being tokenized."""

    items: list[_Item[_Tag]]
    texts: list[TokenizerInput]
    """Inputs of the rows' prompts, in order."""
    ids: Future[list[Encoded]]
    """Token ids or errors of the rows' prompts, in order."""
    refused: dict[int, ErrorInfo]
    """Place in `items` -> error of a row whose tools cannot be called as it says."""


_UNKNOWN_CALLS: Final = (
    "rows have tools, and the format in which the model calls them is not known: calls stay in the text; name the "
    "format with --tool-parser"
)


class Encoder:
    """Tokenizer of rows for one model.

    Prompts are fitted into the context as by `PromptFitter`. If a row has a `suffix` and the tokenizer's family
    supports fill-in-the-middle, prompt and suffix are laid out as the family expects; `left` then drops the beginning
    of the prompt first, `right` the end of the suffix.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: size of the model's vocabulary.
        context_length: most tokens of prompt and output together.
        truncate: side on which prompts that are too long are cut, "none" to refuse them.
        run_seed: seed of the run, from which rows without a seed derive theirs.
        limits: the model's limits for hidden states.
        grammars: where the rows' constraints are compiled; created if None.
        reasoning: the model's format of thoughts, if it has one that is known.
        context_reason: why the context ends before the model's own does; empty: it does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        context_length: int,
        truncate: Truncate = "none",
        run_seed: int = 0,
        limits: CaptureSupport = _NO_STATES,
        grammars: Grammars | None = None,
        reasoning: ReasoningParser | None = None,
        context_reason: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._check_all_ids = tokenizer.vocab_size > vocab_size  # texts may hold ids that the model lacks
        self._context = context_length
        self._truncate = truncate
        self._run_seed = run_seed
        self._fim = find_fim(tokenizer, vocab_size)
        self._texts = PromptTexts(tokenizer, context_length, truncate, fim=self._fim is not None)
        self.grammars = grammars if grammars is not None else Grammars(tokenizer, vocab_size)
        self.reasoning = reasoning
        model = tokenizer, vocab_size, self.grammars, reasoning
        self._check_params_once = lru_cache(_MAX_CHECKED)(lambda params: check_params(params, *model))
        self._limits = limits
        self.tools: ToolParser | None = None
        """The model's format of calls, set by `FrontEnd`."""
        self.calls_are_unknown = False
        """Whether the format was looked for and not found."""
        self.notes: set[str] = set()
        """What users should know of the rows so far."""
        self._separated_once = lru_cache(_MAX_CHECKED)(partial(replace, separate_reasoning=True))
        self.tasks = TaskSupport()
        """What the checkpoint offers for rows with a task, set by `FrontEnd`."""
        self._with_states_once = lru_cache(_MAX_CHECKED)(self._with_states)
        self._fitter = PromptFitter(tokenizer, context_length, truncate, context_reason)

    @property
    def truncated(self) -> int:
        """Number of prompts that were truncated."""
        return self._fitter.truncated

    def encode_rows(
        self, rows: Iterable[tuple[_Tag, ParsedRow | None]]
    ) -> Iterator[tuple[_Tag, list[EncodedPrompt] | ErrorInfo | None]]:
        """Yield the tag of each row, in order, with its tokenized prompts or its error; a bad prompt fails its row.

        A tag with None in place of a row is yielded in its place, with None. Batches of up to 256 are tokenized on a
        separate thread while the next batch is read.
        """
        source = iter(rows)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as executor:
            pending: list[_Batch[_Tag]] = []
            while True:
                items, characters = next_batch(source)
                if not items:
                    break
                pending.append(self._begin_batch(items, executor))
                del items  # so that a large row is gone when the next is read
                while len(pending) > (0 if characters > _LARGE_CHARACTERS else 1):
                    yield from self._finish_batch(pending.pop(0))
            for batch in pending:
                yield from self._finish_batch(batch)

    def can_compile(self, constraints: Sequence[Constraint]) -> bool:
        """Compile constraints that an earlier process accepted; False if one of them fails."""
        self.grammars.prepare(constraints)
        return all(self.grammars.error(constraint) is None for constraint in constraints)

    def _begin_batch(self, items: list[_Item[_Tag]], executor: Executor) -> _Batch[_Tag]:
        refused = self._add_tools(items)
        rows = [row for _, row in items if row is not None]
        texts = self._texts.inputs(rows)
        started = Event()
        ids = executor.submit(self._texts.encode, texts, started)
        started.wait()  # else the thread waits for the interpreter's switch interval, longer than most batches take
        distinct = dict.fromkeys(row.params for row in rows)
        constraints = [constraint for params in distinct if (constraint := params.constraint) is not None]
        self.grammars.prepare(constraints)
        return _Batch(items, texts, ids, refused)

    def _add_tools(self, items: list[_Item[_Tag]]) -> dict[int, ErrorInfo]:
        """Give rows with tools the parameters that follow from them, and texts to embed what goes in front of them.

        Returns the errors by place.
        """
        refused = {}
        for place, (tag, row) in enumerate(items):
            if row is not None and row.params.embed:
                try:
                    items[place] = (tag, self._with_prompt(row))
                except Exception as error:
                    refused[place] = row_error(error, "reading the row's prompt")
            elif row is not None and type(prompt := row.prompts[0]) is ChatPrompt and prompt.tools:
                try:
                    items[place] = (tag, row._replace(params=params_with_tools(row.params, prompt, self.tools)))
                except Exception as error:
                    refused[place] = row_error(error, "reading the row's tools")
        return refused

    def _with_prompt(self, row: ParsedRow) -> ParsedRow:
        """A row to embed whose texts are as the checkpoint expects them."""
        support, name = self.tasks, row.params.prompt_name
        front = support.prompt(name)
        if name is not None and not all(type(prompt) is TextPrompt for prompt in row.prompts):
            raise invalid("prompt_name", "goes in front of texts; give the prompt as `text`, or leave it out")
        if not front and not support.files.lower:
            return row
        written = str.lower if support.files.lower else str
        changed = [p._replace(text=written(front + p.text)) if type(p) is TextPrompt else p for p in row.prompts]
        return row._replace(prompts=tuple(changed))

    def _with_states(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a row with a task, with the states that it reads."""
        assert params.task is not None
        return replace(params, return_hidden_states=self.tasks.states(params.task))

    def _finish_batch(self, batch: _Batch[_Tag]) -> Iterator[tuple[_Tag, list[EncodedPrompt] | ErrorInfo | None]]:
        results = zip(batch.texts, batch.ids.result(), strict=True)
        for place, (tag, row) in enumerate(batch.items):
            if row is None:
                yield tag, None
                continue
            of_row = list(islice(results, len(row.prompts)))
            if place in batch.refused:
                yield tag, batch.refused[place]
                continue
            result: list[EncodedPrompt] | ErrorInfo
            try:
                result = self._finish_scored_row(row, of_row) if row.completions else self._finish_row(row, of_row)
            except Exception as error:
                result = row_error(error, "checking the tokens of the prompt")
            first = row.prompts[0]
            if self.calls_are_unknown and type(first) is ChatPrompt and first.tools and isinstance(result, list):
                self.notes.add(_UNKNOWN_CALLS)
            yield tag, result

    def _finish_scored_row(self, row: ParsedRow, results: list[tuple[TokenizerInput, Encoded]]) -> list[EncodedPrompt]:
        """Each prompt followed by each of the row's texts to score."""
        self.tasks.check(None, None)
        ids_to_score = [token for text in row.completions if not isinstance(text, str) for token in text]
        if ids_to_score and max(ids_to_score) >= self._vocab_size:
            raise out_of_range(scored_field(row.completions), max(ids_to_score), self._vocab_size)
        name, bos, encoded = scored_field(row.completions), self._tokenizer.prefix_ids, list[EncodedPrompt]()
        total = 0
        for given_text in row.completions:
            if isinstance(given_text, str):
                self._part(name, given_text)
        for index, (prompt, result) in enumerate(zip(row.prompts, results, strict=True)):
            text, given = self._known(*result)
            ids = list(given)
            end = self._end_behind_cut(*result)
            for number, joined in enumerate(join_texts(self._tokenizer, end or text, ids, row.completions)):
                if end is not None:
                    joined = PromptWithText(ids + joined.ids[joined.start :], len(ids))
                whole = list(self._add_bos(row, prompt, joined.ids))
                if ids[: len(bos)] == bos != whole[: len(bos)]:
                    whole = bos + whole  # of a conversation whose beginning was cut off
                start = joined.start + len(whole) - len(joined.ids)
                if start == 0:
                    param = _field_of(row, prompt)
                    message = f"`{param}` has no token before the text to score; begin it with more text"
                    raise RowError(ErrorCode.EMPTY_PROMPT, message, param)
                fitted = self._fitter.fit_scored(prompt, whole, start)
                embeds = self._embeds(prompt, len(fitted))
                both = fitted + whole[start:]
                total += len(both)
                if total > SCORED_TOKENS:
                    problem = (
                        f"and the row's prompts have more than {SCORED_TOKENS} tokens together, each text with its"
                    )
                    raise invalid(name, f"{problem} prompt; give fewer of them in a row")
                stored = self._stored(prompt, both, len(fitted))
                encoded.append(EncodedPrompt(index, both, 0, 0, row.params, embeds, len(fitted), number, stored))
        return encoded

    def _finish_row(self, row: ParsedRow, results: list[tuple[TokenizerInput, Encoded]]) -> list[EncodedPrompt]:
        params, task = row.params, row.params.task
        self.tasks.check(task, params.dimensions)
        if task is not None:
            return self._finish_task(row, results)
        seed = row.seed if row.seed is not None else derive_seed(self._run_seed, row.id)
        if self.reasoning is not None and params.separate_reasoning is None and type(row.prompts[0]) is ChatPrompt:
            params = self._separated_once(params)
        self._check_params_once(params)
        encoded = []
        for index, (prompt, result) in enumerate(zip(row.prompts, results, strict=True)):
            _, ids = self._known(*result)
            if isinstance(prompt, StoredPrompt):
                refuse_with_embeds(params)
            if params.suffix is not None and self._fim is not None and not isinstance(prompt, ChatPrompt):
                if items := placed_items(prompt):
                    problem = "cannot go with images and sounds on a model that fills in the middle; leave it out"
                    raise RowError(ErrorCode.UNSUPPORTED_FIELD, f"`suffix` {problem}: {items[0].place}", "suffix")
                fitted: Ids = self._fit_fim(self._fim, row, prompt, list(ids), params.suffix)
                chosen = self._fim.params(params)
            else:
                fitted, chosen = (
                    self._fitter.fit(prompt, self._add_bos(row, prompt, ids), params.max_new_tokens),
                    params,
                )
            if params.logprob_start_len > len(fitted):
                problem = f"must not exceed the prompt's {len(fitted)} tokens, got {params.logprob_start_len}"
                raise RowError(ErrorCode.INVALID_FIELD, f"`logprob_start_len` {problem}", "logprob_start_len")
            limit = self._fitter.new_tokens(len(fitted), params.max_new_tokens)
            if params.returns_prompt_values:
                self._limits.check(params.return_hidden_states, params.return_routed_experts, len(fitted), limit)
            embeds, stored = self._embeds(prompt, len(fitted)), self._stored(prompt, fitted, len(fitted))
            encoded.append(EncodedPrompt(index, fitted, limit, seed, chosen, embeds, stored=stored))
        return encoded

    def _finish_task(self, row: ParsedRow, results: list[tuple[TokenizerInput, Encoded]]) -> list[EncodedPrompt]:
        """The prompts of a row with a task: texts have what the tokenizer itself puts around them."""
        params, support, encoded = self._with_states_once(row.params), self.tasks, list[EncodedPrompt]()
        limit, query = min(support.files.longest or self._context, self._context), list[int]()
        if params.rerank:
            (query,) = self._tokenizer.encode_plain([getattr(row.prompts[0], "query", "")])
        before, between, behind, _ = self._tokenizer.around_pair
        for index, (prompt, result) in enumerate(zip(row.prompts, results, strict=True)):
            _, ids = self._known(*result)
            if not params.rerank:
                around = self._tokenizer.around if type(prompt) is TextPrompt and not prompt.media else ([], [])
                (before, behind), between = around, []
            room = limit - len(before) - len(between) - len(behind)
            first, ids = self._fitter.fit_task(prompt, ids, room, query)
            if before or between or behind or first:
                ids = [*before, *first, *between, *ids, *behind]
            ids = self._add_bos(row, prompt, ids)
            if support.separator is not None and list(ids).count(support.separator) > 1 + bool(between):
                name = self._tokenizer.id_to_token(support.separator)
                raise invalid(_field_of(row, prompt), f"holds the special token {name}, which ends a text; remove it")
            embeds, stored = self._embeds(prompt, len(ids)), self._stored(prompt, ids, len(ids))
            encoded.append(EncodedPrompt(index, ids, 0, 0, params, embeds, stored=stored))
        return encoded

    def _stored(self, prompt: Prompt, ids: Ids, end: int) -> Ints | None:
        """`EncodedPrompt.stored` of a prompt that has its items in front of `end`.

        Raises:
            RowError: as `stored_ids`.
        """
        items = placed_items(prompt)
        if not items:
            return None
        return np.concatenate((stored_ids(ids[:end], items, self._vocab_size), np.array(ids[end:], np.int32)))

    def _known(self, prompt: TokenizerInput, encoded: Encoded) -> tuple[str | None, Ids]:
        """The text and the ids of a prompt that is not too long, or may be truncated; no text if it was given as ids.

        Raises:
            RowError: it could not be tokenized, or exceeds the context.
        """
        if isinstance(encoded, list | array):
            return prompt if isinstance(prompt, str) else None, encoded
        if isinstance(encoded, ErrorInfo):
            raise RowError(encoded.code, encoded.message, encoded.param)
        assert isinstance(encoded, TextPart)
        assert isinstance(prompt, LongText)
        if not encoded.is_whole and self._truncate == "none":
            raise self._fitter.too_long(_size(prompt.text, encoded), "shorten it, or allow --truncate left or right")
        return encoded.text, encoded.ids

    def _end_behind_cut(self, prompt: TokenizerInput, part: Encoded) -> str | None:
        """The end of a prompt of which only the beginning is known; None for any other.

        The tokens of a text to score depend on what is in front of it, which is not where the prompt was cut.
        """
        is_cut = isinstance(part, TextPart) and not part.is_whole
        if is_cut and isinstance(prompt, LongText) and prompt.side == "start":
            return self._texts.long.part(prompt.text, "end").text
        return None

    def _part(self, name: str, text: str) -> str:
        """A suffix or a text to score, or as much of a suffix from its start on as the context may need.

        Raises:
            RowError: `context_length_exceeded`.
        """
        if len(text) <= self._texts.long.piece:
            return text
        part = self._texts.long.part(text, "start")
        if not part.is_whole and (self._truncate == "none" or name != "suffix"):
            message = f"`{name}` {_size(text, part)}, and {self._fitter.context}; shorten it"
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, name)
        return part.text

    def _embeds(self, prompt: Prompt, kept: int) -> StoredPrompt | None:
        """The prompt's embeddings, cut to the `kept` tokens that truncation left; None for a prompt of ids."""
        return prompt.cut(kept, self._truncate) if isinstance(prompt, StoredPrompt) else None

    def _add_bos(self, row: ParsedRow, prompt: Prompt, ids: Ids) -> Ids:
        """`ids` with the tokenizer's BOS in front of text, checked against the vocabulary.

        Raises:
            RowError: `empty_prompt` or `token_out_of_range`.
        """
        prefix = self._tokenizer.prefix_ids
        if isinstance(prompt, TextPrompt) and ids[: len(prefix)] != prefix:
            items = placed_items(prompt) if prompt.media else ()
            ids = ids if items and items[-1].end else [*prefix, *ids]
        if not ids:
            param = _field_of(row, prompt)
            message = f"`{param}` gives no tokens, and the tokenizer adds none; give a prompt that is not empty"
            raise RowError(ErrorCode.EMPTY_PROMPT, message, param)
        checked = self._check_all_ids or isinstance(prompt, TokenPrompt)
        largest = 0 if not checked else max(ids) if isinstance(ids, list) else int(np.frombuffer(ids, np.int32).max())
        if largest >= self._vocab_size and not placed_items(prompt):
            raise out_of_range(_field_of(row, prompt), largest, self._vocab_size)
        return ids

    def _fit_fim(self, fim: FillInTheMiddle, row: ParsedRow, prompt: Prompt, ids: list[int], suffix: str) -> list[int]:
        """Fill-in-the-middle prompt of `ids` and `suffix`, truncated as by `PromptFitter.fit`.

        Raises:
            RowError: see `_add_bos` and `PromptFitter.fit`; also if the layout alone exceeds the length of a truncated
                prompt.
        """
        after = fim.suffix_ids(self._part("suffix", suffix))
        whole = list(self._add_bos(row, prompt, fim.prompt(ids, after, 0, "none")))
        keep = self._fitter.kept_length(len(whole), row.params.max_new_tokens)
        if keep >= len(whole):
            return whole
        bos = len(whole) - len(fim.prompt(ids, after, 0, "none"))
        fitted = list(self._add_bos(row, prompt, fim.prompt(ids, after, keep - bos, self._truncate)))
        if len(fitted) > keep:
            raise self._fitter.too_long(f"has {len(whole)} tokens", "shorten it")
        self._fitter.truncated += 1
        return fitted


def _size(text: str, part: TextPart) -> str:
    return f"has {len(text)} characters, the first {len(part.text)} of which are {len(part.ids)} tokens"


def _field_of(row: ParsedRow, prompt: Prompt) -> str:
    """Name of the field that a prompt came from."""
    if isinstance(prompt, ChatPrompt):
        return "messages"
    if row.dialect == "openai-completions":
        return "prompt"
    if row.params.rerank:
        return "documents"
    if row.dialect == "openai-embeddings":
        return "input"
    if isinstance(prompt, StoredPrompt):
        return "input_embeds"
    return "text" if isinstance(prompt, TextPrompt) else "input_ids"
