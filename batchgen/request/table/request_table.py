"""Parsed rows, tokenised requests, and the column store of all requests of a job."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batchgen.request.completion import Dialect
from batchgen.request.fields.constraint import Constraint
from batchgen.request.fields.media_items import MediaItems
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import Prompt, StoredPrompt, TextPrompt
from batchgen.request.table.columns import Column, Columns
from batchgen.request.table.embeds_store import EmbedsStore


class ParsedRow(NamedTuple):
    """One input row after validation and before tokenisation."""

    row_index: int
    """Index of the row in the whole input."""
    id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    """The row's parameter set, without its seed. Rows with equal sets share one object."""
    extra: Mapping[str, Any]
    """Unknown top-level keys, carried to the output."""
    dialect: Dialect = "native"
    completions: tuple[str | tuple[int, ...], ...] = ()
    """Texts or ids to score after each prompt; empty for a row that generates."""
    seed: int | None = None
    """None: the seed is derived from the run seed and the row's id."""

    @property
    def is_plain(self) -> bool:
        """Whether the row is native and generates for text that no chat template was applied to."""
        return isinstance(self.prompts[0], TextPrompt) and self.dialect == "native" and not self.completions


@dataclass(frozen=True, slots=True)
class Request:
    """One tokenised prompt with its sampling parameters."""

    index: int
    """Index in the `RequestTable`."""
    row_index: int
    """Index of the input row."""
    prompt_index: int
    """Index among the prompts of the row."""
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids; zeros for tokens given as embeddings, the model's placeholder ids for those of items."""
    params: SamplingParams
    seed: int
    """The row's seed, or the one derived from the run seed and the row's id."""
    max_new_tokens: int
    """Effective limit, clipped to the context."""
    embeds: StoredPrompt | None = None
    """Leading tokens of the prompt that are given as embeddings."""
    score_start: int = -1
    """Position in `prompt_ids` at which the text to score begins; -1: nothing is scored."""
    media_tokens: int | None = None
    """Tokens of the prompt that images and sounds became; None without any."""

    @property
    def known_ids(self) -> npt.NDArray[np.int32]:
        """The ids of `prompt_ids` without the leading tokens that are given as embeddings."""
        return self.prompt_ids if self.embeds is None else self.prompt_ids[self.embeds.length :]


class TokenStore(Protocol):
    """Token ids of all prompts of a table, concatenated in the order in which they are appended."""

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Add the ids of a prompt."""
        ...

    def ids(self) -> npt.NDArray[np.int32]:
        """[total] all ids so far."""
        ...


class _TokenBuffer:
    """Token store in memory."""

    def __init__(self, ids: npt.NDArray[np.int32] | None = None) -> None:
        self._ids = array("i")
        if ids is not None:
            self._ids.frombytes(ids.tobytes())

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        self._ids.frombytes(np.asarray(ids, dtype=np.int32).tobytes())

    def ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._ids, np.int32) if self._ids else np.zeros(0, np.int32)


class RequestTable(Columns):
    """Column store of all requests of a job, about 15 bytes per prompt in addition to its tokens.

    Equal `SamplingParams` are stored once, with the seed in a separate column. Token ids are in a `TokenStore`. Prompts
    given as embeddings have zeros for ids and rows in the store `embeds`. Tokens of images and sounds have the ids of
    their items in `media`. `columns` and `restore_columns` exclude tokens, parameter sets, embeddings and items.
    """

    _columns = ("_offsets", "_row_index", "_prompt_index", "_params_id", "_seed", "_max_new", "_score_start")

    def __init__(self, embeds: EmbedsStore | None = None, tokens: TokenStore | None = None) -> None:
        """Create an empty table; its token ids are stored in `tokens`, in memory if None."""
        self.embeds = embeds
        self.media: MediaItems | None = None
        """Images and sounds of the prompts; None until a row has one."""
        self._tokens = _TokenBuffer() if tokens is None else tokens
        self._stored_prompts: list[StoredPrompt] = []
        self._stored_prompt_numbers: dict[StoredPrompt, int] = {}
        self._embeds_id = array("i")
        """Index into `_stored_prompts` or -1, per request; empty until a request has embeddings."""
        self._offsets = Column("q", narrowest="i")
        self._offsets.append(0)
        self._end = 0
        """Number of ids in the token store."""
        self._row_index = Column("q")
        self._prompt_index = Column("i")
        self._params_id = Column("i")
        self._seed = Column("q")
        self._max_new = Column("i")
        self._score_start = Column("i")
        self.params: list[SamplingParams] = []
        """Distinct parameter sets, without seeds."""
        self._params_numbers: dict[SamplingParams, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The table for another process, without embeddings and the sources of items."""
        return {**vars(self), "embeds": None, "_tokens": _TokenBuffer(self.tokens)}

    def append(
        self,
        row_index: int,
        prompt_index: int,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        seed: int,
        max_new_tokens: int,
        embeds: StoredPrompt | None = None,
    ) -> int:
        """Add a prompt and return its index."""
        if embeds is not None or self._embeds_id:
            self._embeds_id.extend([-1] * (len(self) - len(self._embeds_id)))
            self._embeds_id.append(-1 if embeds is None else self._embeds_number(embeds))
        self._tokens.append(prompt_ids)
        params_id = self._params_numbers.get(params)
        if params_id is None:
            params_id = self._params_numbers[params] = len(self.params)
            self.params.append(params)
        self.pack(self._row_index)
        self._end += len(prompt_ids)
        self._offsets.append(self._end)
        self._row_index.append(row_index)
        self._prompt_index.append(prompt_index)
        self._params_id.append(params_id)
        self._seed.append(seed)
        self._max_new.append(max_new_tokens)
        self._score_start.append(-1)
        return len(self._row_index) - 1

    def set_score_start(self, start: int) -> None:
        """Mark the ids of the prompt added last as a text to score from `start` on.

        The texts of one (row, prompt) are added one after the other.
        """
        self._score_start.tail[-1] = start

    def _embeds_number(self, span: StoredPrompt) -> int:
        number = self._stored_prompt_numbers.setdefault(span, len(self._stored_prompts))
        if number == len(self._stored_prompts):
            self._stored_prompts.append(span)
        return number

    def restore_params(self, params: Sequence[SamplingParams]) -> None:
        """Complete `restore_columns` with the parameter sets of the saved table, whose token store this table has."""
        self.params = list(params)
        self._end = self._offsets[len(self)]

    def stored_ids(self, index: int) -> npt.NDArray[np.int32]:
        """[P] ids of one prompt in `tokens`, with those of items."""
        return self.tokens[self._offsets[index] : self._offsets[index + 1]]

    def prompt_ids(self, index: int) -> npt.NDArray[np.int32]:
        """[P] token ids of one prompt, with the model's placeholder ids in place of those of items."""
        return self.stored_ids(index) if self.media is None else self.media.real_ids(self.stored_ids(index))

    def media_of(self, index: int) -> list[int]:
        """Numbers of the items of one prompt, in order."""
        return [] if self.media is None else self.media.in_prompt(self.stored_ids(index))

    def media_tokens(self, index: int) -> int | None:
        """Number of tokens of one prompt that items became; None without any."""
        if self.media is None:
            return None
        return int((self.stored_ids(index) >= self.media.vocab_size).sum()) or None

    def numbers(self, index: int) -> tuple[int, int, int, int]:
        """(index of its parameters in `params`, seed, limit, start of the scored text) of one prompt."""
        return self._params_id[index], self._seed[index], self._max_new[index], self._score_start[index]

    def requests_of(self, row: int, prompt: int) -> range:
        """Indexes of the prompts with this row and prompt index: several if texts are scored with it.

        Rows, and the prompts of each, must have been added in ascending order.
        """
        rows, count = self._row_index, len(self)
        # with one prompt in every row, each row is at its own index
        if rows.is_index(row):
            return range(row, row + 1)
        own = row < count and rows[row] == row and (not row or rows[row - 1] != row)
        first = row if own else bisect_left(rows, row)
        end = row + 1 if own and (row + 1 == count or rows[row + 1] != row) else bisect_left(rows, row + 1, first)
        if end > first + 1:
            first = bisect_left(self._prompt_index, prompt, first, end)
            end = bisect_left(self._prompt_index, prompt + 1, first, end)
        return range(first, end)

    def embeds_of(self, index: int) -> StoredPrompt | None:
        """Leading tokens of a prompt that are given as embeddings."""
        number = self._embeds_id[index]
        return None if number < 0 else self._stored_prompts[number]

    def __len__(self) -> int:
        return len(self._row_index)

    def __iter__(self) -> Iterator[Request]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Request:
        return Request(
            index=index,
            row_index=self._row_index[index],
            prompt_index=self._prompt_index[index],
            prompt_ids=self.prompt_ids(index),
            params=self.params[self._params_id[index]],
            seed=self._seed[index],
            max_new_tokens=self._max_new[index],
            embeds=self.embeds_of(index) if self._embeds_id else None,
            score_start=self._score_start[index],
            media_tokens=self.media_tokens(index),
        )

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """[total] token ids of all prompts, concatenated; ids from the vocabulary's end on are those of `media`."""
        return self._tokens.ids()

    @property
    def offsets(self) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
        """[N + 1] bounds of the prompts: prompt i is `tokens[offsets[i]:offsets[i + 1]]`. int32 if that holds them."""
        return self._offsets.stored()

    @property
    def row_index(self) -> npt.NDArray[np.int64]:
        """[N] index of each prompt's input row."""
        return self._row_index.values()

    @property
    def prompt_index(self) -> npt.NDArray[np.int32]:
        """[N] index of each prompt in its row."""
        return self._prompt_index.values()

    @property
    def params_id(self) -> npt.NDArray[np.int32]:
        """[N] index of each prompt's parameters in `params`."""
        return self._params_id.values()

    @property
    def seed(self) -> npt.NDArray[np.int64]:
        """[N] seed of each prompt."""
        return self._seed.values()

    @property
    def max_new_tokens(self) -> npt.NDArray[np.int32]:
        """[N] effective limit of each prompt."""
        return self._max_new.values()

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together of any request; 0 without any."""
        return int((np.diff(self.offsets) + self.max_new_tokens).max(initial=0))

    @property
    def embeds_id(self) -> npt.NDArray[np.int32] | None:
        """[N] number of each prompt's embeddings, equal for equal embeddings, -1 without; None if no prompt has any."""
        return np.frombuffer(self._embeds_id, np.int32) if self._embeds_id else None

    @property
    def score_start(self) -> npt.NDArray[np.int32]:
        """[N] position at which each prompt's text to score begins, -1 without one."""
        return self._score_start.values()

    def by_params(self, values: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """[N] the value of each prompt's parameter set, given those of all sets."""
        return np.array(values, dtype)[self._params_id.stored()] if values else np.zeros(0, dtype)

    def constraints(self, done: npt.NDArray[np.bool_] | None = None) -> list[Constraint]:
        """Constraints of the requests that are not `done` [N]."""
        used = np.unique(self.params_id if done is None else self.params_id[~done])
        return [constraint for index in used.tolist() if (constraint := self.params[index].constraint) is not None]
