"""Rows in, a `RequestTable` out: parse, refuse duplicates, tokenise, in batches and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from batchgen.engine.embeds import EmbedsReader
from batchgen.errors import ErrorCode, ErrorInfo, RowError
from batchgen.media_root import MediaRoot
from batchgen.prompts import EmbedsPrompt
from batchgen.request import ParsedRow, RequestTable
from batchgen.rows import RowDefaults, parse_row, row_extra, row_id
from batchgen.text.encode import EncodedPrompt, Encoder

__all__ = ["Intake", "OnDuplicate", "TakenRow"]

OnDuplicate = Literal["error", "suffix", "allow"]


class TakenRow(NamedTuple):
    """What became of one input row: its requests stand in the table from `first` on, or it has an error."""

    row_index: int
    id: str
    extra: Mapping[str, Any]
    row: ParsedRow | None
    prompts: list[EncodedPrompt]
    first: int
    error: ErrorInfo | None


class Intake:
    """Turns rows into requests. Keeps the interpreter's hash of each id to know duplicates; no text is kept."""

    def __init__(
        self,
        table: RequestTable,
        encoder: Encoder,
        defaults: RowDefaults,
        on_duplicate: OnDuplicate = "error",
        media_root: MediaRoot | None = None,
    ) -> None:
        """Rows with embeddings need a table with a store for them."""
        self._table = table
        self._encoder = encoder
        self._defaults = defaults
        self._on_duplicate = on_duplicate
        self._seen: set[int] = set()
        self._numbers: dict[int, int] = {}
        """For ids that came more than once the least number that may be free for the next."""
        self._embeds = EmbedsReader(table.embeds, media_root or MediaRoot(None)) if table.embeds is not None else None

    def feed(self, rows: Iterable[tuple[int, Mapping[str, Any] | ErrorInfo]]) -> Iterator[TakenRow]:
        """Take (row_index, row or the reader's error) and say, in order, what became of each."""
        # The values themselves are let go one by one: embeddings are on disk once their row is parsed.
        for item, prompts in self._encoder.encode_rows(self._parse(index, value) for index, value in rows):
            if isinstance(item, TakenRow):
                yield item
            else:
                assert prompts is not None
                yield self._accept(item, prompts)

    def _parse(self, index: int, value: Mapping[str, Any] | ErrorInfo) -> ParsedRow | TakenRow:
        if isinstance(value, ErrorInfo):
            return TakenRow(index, f"row-{index}", {}, None, [], -1, value)
        try:
            row = self._unique(parse_row(value, index, self._defaults))
            if not isinstance(row.prompts[0], EmbedsPrompt):
                return row
            assert self._embeds is not None
            return self._embeds.store(row)
        except RowError as error:
            return TakenRow(index, row_id(value, index), row_extra(value), None, [], -1, error.info)

    def _unique(self, row: ParsedRow) -> ParsedRow:
        if self._on_duplicate == "allow" or self._claim(row.id):
            return row
        if self._on_duplicate == "error":
            raise RowError(
                ErrorCode.DUPLICATE_ID,
                f"id {row.id!r} was used by an earlier row; make ids unique or run with --on-duplicate-id suffix",
                "id",
            )
        key = _hash(row.id)
        number = self._numbers.get(key, 2)
        while not self._claim(f"{row.id}-{number}"):
            number += 1
        self._numbers[key] = number + 1
        return row._replace(id=f"{row.id}-{number}")

    def _claim(self, row_id: str) -> bool:
        key = _hash(row_id)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _accept(self, row: ParsedRow, encoded: list[EncodedPrompt] | ErrorInfo) -> TakenRow:
        if isinstance(encoded, ErrorInfo):
            return TakenRow(row.row_index, row.id, row.extra, row, [], -1, encoded)
        first = len(self._table)
        for prompt in encoded:
            self._table.append(
                row.row_index,
                prompt.prompt_index,
                prompt.ids,
                prompt.params,
                prompt.seed,
                prompt.max_new_tokens,
                prompt.embeds,
                prompt.score_start,
            )
        return TakenRow(row.row_index, row.id, row.extra, row, encoded, first, None)


def _hash(row_id: str) -> int:
    return hash(row_id)
