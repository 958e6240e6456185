"""`RowReader`: parses and tokenises rows into a `RequestTable`, in batches and in order.

`python_rows` gives the rows of what a Python caller has.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np

from batchgen.engine.media.embeds_reader import EmbedsReader, TensorFiles
from batchgen.engine.media.reader import MediaReader, MediaSupport, has_media, no_media
from batchgen.errors import ErrorCode, ErrorInfo, RowError, UsageError, row_error
from batchgen.media.root import MediaRoot
from batchgen.request.fields.prompts import EmbedsPrompt
from batchgen.request.rows.parser import is_openai_line, parse_row, row_extra
from batchgen.request.rows.raw_row import RawRow, UnreadableRow
from batchgen.request.rows.row_ids import row_id
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import ParsedRow, RequestTable
from batchgen.text.encode import EncodedPrompt, Encoder
from batchgen.text.prompt_texts import characters_of

_GROW_BLOCK = 1 << 16
"""Number of slots moved at once when a set of hashes grows."""

_MOST_AHEAD = 64
"""Most rows that wait while images and sounds at URLs are fetched, and most of these."""
_AHEAD_SIZE = 8 << 20
"""Characters of rows that wait beyond which no further one does."""

_TABLE_ATTRIBUTES = ("keys", "columns", "column_names")
"""What tables have, and lists of prompts have not."""


class ReadRecord(Protocol):
    """Receives which rows are being read, and knows which of them ended earlier runs. Rows are given by their index."""

    @property
    def refused(self) -> Mapping[int, ErrorInfo]:
        """Row -> its error, for rows that are not read any more."""
        ...

    @property
    def has_suspects(self) -> bool:
        """Whether any row is read by itself."""
        ...

    def is_suspect(self, row: int) -> bool:
        """Whether a row is read by itself."""
        ...

    def parsing(self, row: int) -> None:
        """A row is being parsed; it is in work until `parsed` names it or a later one."""
        ...

    def parsing_alone(self, row: int) -> None:
        """A row is about to be parsed, all before it are read, and no other is until it is."""
        ...

    def parsed(self, row: int) -> None:
        """A row and all before it are read."""
        ...

    def end_reading(self) -> None:
        """No row is being read."""
        ...


class ArrowTable(Protocol):
    """A table that exports itself through the Arrow PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Its Arrow stream."""
        ...


def python_rows(rows: Any) -> Iterator[RawRow]:
    """The rows that a Python caller gives: mappings as in an input file, strings that are prompts, or those of a table.

    A table is what exports itself as an Arrow stream, as those of pandas, polars, pyarrow and DuckDB do. Anything else
    is iterated, as the datasets of Hugging Face. No library is imported for it.

    Raises:
        UsageError: `rows` is one row, columns by name, or cannot be iterated; or, once its rows are asked for, it is a
            table of another kind, whose iteration gives its column names.
    """
    kind = type(rows).__name__
    if isinstance(rows, str | bytes):
        raise UsageError(f"`rows` must be a list of rows or a table, got one {kind}; call generate([row])")
    if isinstance(rows, Mapping):
        remedy = "call generate([row]) for one row; for columns, give a table, such as pandas.DataFrame(columns)"
        raise UsageError(f"`rows` must be a list of rows or a table, got one {kind}; {remedy}")
    if hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__"):
        from batchgen.tables.arrow_values import table_items  # imports pyarrow, which lists of rows do without

        return _raw_rows(table_items(rows), kind, is_table=False)
    if not isinstance(rows, Iterable):
        remedy = "collect it first" if hasattr(rows, "collect") else "give a list"
        raise UsageError(f"`rows` must be a list of rows or a table, got {kind}, which cannot be iterated; {remedy}")
    return _raw_rows(rows, kind, is_table=any(hasattr(rows, name) for name in _TABLE_ATTRIBUTES))


def _raw_rows(items: Iterable[Any], kind: str, *, is_table: bool) -> Iterator[RawRow]:
    for index, item in enumerate(items):
        if isinstance(item, UnreadableRow):
            yield RawRow(index, error=item.info).with_readable(item.readable)
        elif not isinstance(item, str):
            yield RawRow(index, value=item)
        elif is_table:
            remedy = "give its rows as dictionaries, or a table of pandas, polars or pyarrow"
            raise UsageError(f"`rows` is of the type {kind}, whose iteration gives strings and not rows; {remedy}")
        else:
            yield RawRow(index, value={"text": str(item)})


OnDuplicate = Literal["error", "suffix", "allow"]


@dataclass(slots=True)
class ProcessedRow:
    """One input row with what became of it: its requests are in the table, or it has an error."""

    raw: RawRow
    """The row as read; without its value if that holds embeddings."""
    id: str
    extra: Mapping[str, Any]
    """The row's fields to carry to the output."""
    row: ParsedRow | None = None
    """None if the row cannot be parsed."""
    prompts: Sequence[EncodedPrompt] = ()
    """Its prompts, which are also the last requests of the table; empty if the row has an error."""
    error: ErrorInfo | None = None
    is_line: bool = False
    """Whether the row is an OpenAI batch line, as far as it could be read."""
    prepared: Any = None
    """What the caller of `RowReader.read` has prepared of it."""


class RowReader:
    """Turns rows into requests. Keeps a hash of each row id to find duplicates, but no text."""

    def __init__(
        self,
        table: RequestTable,
        encoder: Encoder,
        defaults: RowDefaults,
        on_duplicate: OnDuplicate = "error",
        media_root: MediaRoot | None = None,
        media: MediaSupport | None = None,
    ) -> None:
        """`table` must have an embeddings store if rows have embeddings; `media`: what the model takes of it."""
        self._table = table
        self._encoder = encoder
        self._defaults = defaults
        self._on_duplicate = on_duplicate
        self._seen = _HashSet()
        self._numbers: dict[int, int] = {}
        """Hash of a duplicate id -> least number that may be free as its suffix."""
        files = TensorFiles(media_root or MediaRoot(None))
        self._media = MediaReader(table, media or no_media("it is not known which the model takes"), files)
        self._embeds = EmbedsReader(table.embeds, files) if table.embeds is not None else None

    def read(
        self,
        rows: Iterable[RawRow],
        prepare: Callable[[ProcessedRow], object] | None = None,
        record: ReadRecord | None = None,
    ) -> Iterator[ProcessedRow]:
        """Process rows, or the errors of those that cannot be read, and yield the results in order.

        Whatever a row raises becomes its error; what cannot be a row's is raised (see `errors.row_error`).

        `prepare` is called with each row before it is in the table, and gives its `prepared`, None if it raises. Rows
        that `record` suspects are read one by one.
        """
        if record is None:
            yield from self._read(rows, prepare)
            return
        refused = record.refused
        if refused:
            rows = (_refused(raw, refused.get(raw.index)) for raw in rows)
        groups: Iterable[tuple[int | None, Iterable[RawRow]]] = [(None, rows)]
        if record.has_suspects:
            groups = groupby(rows, key=lambda raw: raw.index if record.is_suspect(raw.index) else None)
        for suspect, group in groups:
            parsing = record.parsing if suspect is None else record.parsing_alone
            for item in self._read(_reported(group, parsing), prepare):
                yield item
                record.parsed(item.raw.index)
        record.end_reading()

    def _read(self, rows: Iterable[RawRow], prepare: Callable[[ProcessedRow], object] | None) -> Iterator[ProcessedRow]:
        # Values are freed one by one: embeddings are on disk once their row is parsed.
        items = ((item, item.row) for item in self._with_media(map(self._parse, rows)))
        for item, prompts in self._encoder.encode_rows(items):
            if isinstance(prompts, ErrorInfo):
                item.error = prompts
            elif prompts is not None:
                item.prompts = prompts
            if prepare is not None:
                try:
                    item.prepared = prepare(item)
                except Exception as error:
                    info = row_error(error, "preparing the row's output")
                    item.error, item.prompts = item.error or info, ()
            if item.error is None:
                self._add_to_table(item)
            yield item
            del item  # so that a large row is gone when the next is read

    def _parse(self, raw: RawRow) -> ProcessedRow:
        if raw.error is not None:
            (_, extra), line = _known_of(raw.readable, raw.index)
            name = f"row-{raw.index}" if raw.id is None else raw.id
            return ProcessedRow(raw._replace(readable={}), name, extra, error=raw.error, is_line=line)
        value = raw.value
        try:
            row = self._with_unique_id(parse_row(value, raw.index, self._defaults, raw.displaced))
            if isinstance(row.prompts[0], EmbedsPrompt):
                assert self._embeds is not None
                raw, row = raw._replace(value=None), self._embeds.store(row)
            return ProcessedRow(raw, row.id, row.extra, row, is_line=row.dialect != "native")
        except Exception as error:
            return _wrong(raw, error)

    def _with_media(self, items: Iterable[ProcessedRow]) -> Iterator[ProcessedRow]:
        """The rows with their images and sounds read, in order, while URLs of later rows are fetched."""
        waiting: deque[tuple[ProcessedRow, int, int]] = deque()  # number of items that are fetched, size
        try:
            for item in items:
                row = item.row
                media = row is not None and has_media(row)
                if not media and not waiting:
                    yield item
                    del item, row  # so that a large row is gone when the next is read
                    continue
                fetching = self._media.begin(row) if media and row is not None else 0
                waiting.append((item, fetching, _size_of(row)))
                del item, row
                while _is_due(waiting):
                    yield self._with_items(waiting.popleft()[0])
            while waiting:
                yield self._with_items(waiting.popleft()[0])
        finally:
            self._media.end_fetching()

    def _with_items(self, item: ProcessedRow) -> ProcessedRow:
        if item.row is None or not has_media(item.row):
            return item
        try:
            item.row = self._media.read(item.row)
            item.raw = item.raw._replace(value=None)
            return item
        except Exception as error:
            return _wrong(item.raw, error)

    def _with_unique_id(self, row: ParsedRow) -> ParsedRow:
        if self._on_duplicate == "allow" or self._seen.add(hash(row.id)):
            return row
        if self._on_duplicate == "error":
            raise RowError(
                ErrorCode.DUPLICATE_ID,
                f"id {row.id!r} was used by an earlier row; make ids unique or run with --on-duplicate-id suffix",
                "id",
            )
        key = hash(row.id)
        number = self._numbers.get(key, 2)
        while not self._seen.add(hash(f"{row.id}-{number}")):
            number += 1
        self._numbers[key] = number + 1
        return row._replace(id=f"{row.id}-{number}")

    def _add_to_table(self, item: ProcessedRow) -> None:
        for prompt in item.prompts:
            ids = prompt.ids if prompt.stored is None else prompt.stored
            rest = prompt.params, prompt.seed, prompt.max_new_tokens, prompt.embeds
            self._table.append(item.raw.index, prompt.prompt_index, ids, *rest)
            if prompt.score_start >= 0:
                self._table.set_score_start(prompt.score_start)


def _is_due(waiting: deque[tuple[ProcessedRow, int, int]]) -> bool:
    """Whether the first of the rows that wait is to be read now: nothing of it is fetched, or too much waits."""
    if not waiting:
        return False
    _, fetching, sizes = zip(*waiting, strict=True)
    return not fetching[0] or max(sum(fetching), len(waiting)) > _MOST_AHEAD or sum(sizes) > _AHEAD_SIZE


def _reported(rows: Iterable[RawRow], parsing: Callable[[int], None]) -> Iterator[RawRow]:
    """The rows; `parsing` is called with the index of each just before it is parsed."""
    for raw in rows:
        parsing(raw.index)
        yield raw


def _refused(raw: RawRow, error: ErrorInfo | None) -> RawRow:
    """A row that is not parsed, with the id and fields that it gives; without an error, the row."""
    return raw if error is None else raw._replace(value=None, error=error).with_readable(raw.fields)


def _wrong(raw: RawRow, error: Exception) -> ProcessedRow:
    """A row whose fields are wrong."""
    info = row_error(error, "checking the fields of the row")
    known, line = _known_of(raw.value, raw.index)
    return ProcessedRow(raw._replace(value=None), *known, error=info, is_line=line)


def _size_of(row: ParsedRow | None) -> int:
    """About as many bytes as a row that waits holds."""
    if row is None:
        return 0
    items = (item.source for prompt in row.prompts for item in getattr(prompt, "media", ()))
    return characters_of(row) + sum(len(source) for source in items if isinstance(source, str | bytes))


def _known_of(value: Any, row_index: int) -> tuple[tuple[str, Mapping[str, Any]], bool]:
    """(id, carried fields) of a row with an error, and whether it is an OpenAI batch line; what raises is left out."""
    try:
        line = isinstance(value, Mapping) and is_openai_line(value)
        return (row_id(value, row_index), row_extra(value)), line
    except Exception as error:
        row_error(error, "reading the id")  # raises what is not the row's
        return (f"row-{row_index}", {}), False


class _HashSet:
    """Set of 64-bit hashes in an array with linear probing: 12 to 24 bytes each, a fraction of a set's."""

    def __init__(self) -> None:
        self._slots = array("q", bytes(8 << 10))
        """The hash in each slot, 0 for none; their number is a power of two."""
        self._room = 2 * len(self._slots) // 3
        """Number of hashes to add until it grows."""

    def add(self, value: int) -> bool:
        """Add a hash; returns whether it is new."""
        value = value or 1  # 0 is the mark of a free slot
        slots = self._slots
        mask = len(slots) - 1
        at = value & mask
        while held := slots[at]:
            if held == value:
                return False
            at = (at + 1) & mask
        slots[at] = value
        self._room -= 1
        if not self._room:
            self._grow()
        return True

    def _grow(self) -> None:
        old = np.frombuffer(self._slots, np.int64)
        self._slots = array("q", bytes(8)) * (2 * len(old))
        slots = np.frombuffer(self._slots, np.int64)
        for start in range(0, len(old), _GROW_BLOCK):
            block = old[start : start + _GROW_BLOCK]
            values = block[block != 0]
            at = values & (len(slots) - 1)
            while len(values):
                free = slots[at] == 0
                slots[at[free]] = values[free]
                left = slots[at] != values  # another one has taken the slot
                values, at = values[left], (at[left] + 1) & (len(slots) - 1)
        self._room = 2 * len(old) // 3
