"""Ingestion: all rows of a job parsed and tokenised into the request table, their ids and texts spooled to disk."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from batchgen.config.run_config import RunConfig
from batchgen.data.read.input_set import InputSet
from batchgen.data.read.raw_row import RawRow
from batchgen.data.read.selection import Selection
from batchgen.data.row_shapes import RowShapes
from batchgen.data.write.expected import ExpectedKeys
from batchgen.data.write.schema import extra_json
from batchgen.data.write.spool import BlobSpool, TokenSpool
from batchgen.engine.row_reader import ProcessedRow, RowReader
from batchgen.errors import ErrorInfo, InputError
from batchgen.request.columns import Columns
from batchgen.request.completion import Completion
from batchgen.request.printable import printable
from batchgen.request.prompts import ChatPrompt
from batchgen.request.table import ParsedRow, RequestTable
from batchgen.text.encode import EncodedPrompt

__all__ = ["BAD", "TEXTS", "TOKENS", "Ingested", "RowTexts", "ingest", "selection_of"]

TOKENS, TEXTS, BAD = "tokens", "texts", "bad"
"""File names of the token ids, the rows' texts and the bad rows."""


class RowTexts(Columns):
    """Id, carried fields and prompt texts of each good row, on disk, by row index: the output needs them again."""

    _columns = ("_rows",)

    def __init__(self, spool: BlobSpool) -> None:
        self.spool = spool
        self._rows = array("q")

    def add(self, row_index: int, row_id: str, extra: str | None, prompts: list[str | None] | None) -> None:
        """Add a row. Rows must come in ascending order."""
        self._rows.append(row_index)
        self.spool.append(orjson.dumps([row_id, extra, prompts]))

    def __getitem__(self, row_index: int) -> tuple[str, str | None, list[str | None] | None]:
        rows = self._rows  # without bad rows, each row is at its own index
        place = row_index if row_index < len(rows) and rows[row_index] == row_index else bisect_left(rows, row_index)
        blob = self.spool.get(place)
        assert blob is not None
        row_id, extra, prompts = orjson.loads(blob)
        return row_id, extra, prompts


@dataclass(slots=True)
class Ingested:
    """All rows of a job, tokenised. Bad rows are not in `table`; `errors` counts them."""

    table: RequestTable
    texts: RowTexts
    bad: BlobSpool
    """Bad rows that become error rows of the output, as JSON."""
    expected: ExpectedKeys = field(default_factory=ExpectedKeys)
    """Keys that the output must contain."""
    shapes: RowShapes = field(default_factory=RowShapes)
    """Request shape (chat, echo) of each row."""
    rows: int = 0
    """Number of rows read, bad ones included."""
    skipped: int = 0
    """Number of bad rows left out because of `--on-bad-row skip`."""
    errors: Counter[str] = field(default_factory=Counter)
    """Error code -> number of rows."""
    first_prompt: tuple[str, list[int]] | None = None
    """(row id, token ids) of the first good row's first prompt."""

    def close(self, *, keep: bool = False) -> None:
        """Close the files of texts and bad rows; remove them unless `keep`."""
        self.texts.spool.close(keep=keep)
        self.bad.close(keep=keep)


def selection_of(config: RunConfig) -> Selection:
    """The rows of the input that the options select."""
    return Selection(
        offset=config.offset,
        limit=config.limit,
        sample=config.sample,
        sample_seed=config.engine.seed,
        shard=(config.shard.index, config.shard.count) if config.shard else None,
    )


def ingest(
    config: RunConfig,
    inputs: InputSet,
    row_reader: RowReader,
    table: RequestTable,
    folder: Path,
    decode: Callable[[list[int]], str],
    on_row: Callable[[int], None] = lambda rows: None,
    on_error: Callable[[Completion, str, str | None], None] = lambda completion, row_id, extra: None,
    on_skipped: Callable[[Completion, str, str | None], None] = lambda completion, row_id, extra: None,
) -> Ingested:
    """Read, parse and tokenise every row.

    Args:
        config: selection, `--carry`, `--include-prompt` and `--on-bad-row`.
        inputs: the opened files.
        row_reader: parses rows and tokenises them into `table`.
        table: the request table; its token ids are in a memory-mapped file.
        folder: receives the files `tokens`, `texts` and `bad`, which the caller removes.
        decode: token ids -> text, for `--include-prompt`.
        on_row: called with the number of rows read so far.
        on_error: called with the completion, id and carried fields of each bad row that becomes an error row.
        on_skipped: called in the same way for each bad row that is skipped.

    Raises:
        InputError: a row is bad, with `--on-bad-row fail`.
    """
    result = Ingested(table, RowTexts(BlobSpool(folder / TEXTS)), BlobSpool(folder / BAD))
    table.use_external_tokens(np.zeros(0, np.int32))
    raw_rows = inputs.rows(config.prompt_column, config.id_column, selection_of(config))
    raw_by_index: dict[int, RawRow] = {}
    with TokenSpool(folder / TOKENS) as tokens:
        for processed in row_reader.read(_row_values(raw_rows, raw_by_index)):
            raw = raw_by_index.pop(processed.row_index)
            result.rows += 1
            on_row(result.rows)
            extra = _carried_json(
                config.carry, {**raw.displaced, **processed.extra} if raw.displaced else processed.extra
            )
            if processed.error is not None:
                error = _with_location(processed.error, raw)
                _bad_row(config.on_bad_row, error, processed, result)
                bad = Completion(processed.row_index, error=error)
                if config.on_bad_row == "skip":
                    on_skipped(bad, processed.id, extra)
                else:
                    result.expected.add(processed.row_index)
                    result.shapes.add(processed.row_index)
                    result.bad.append(orjson.dumps([processed.row_index, processed.id, extra, *astuple(error)]))
                    on_error(bad, processed.id, extra)
                continue
            assert processed.row is not None
            first_texts = [p for p in processed.prompts if p.text_index == 0]
            prompts = None
            if config.include_prompt:
                prompts = [decode(_prompt_ids(p)) if p.embeds is None else None for p in first_texts]
            result.texts.add(processed.row_index, processed.id, extra, prompts)
            result.shapes.add(processed.row_index, _is_chat(processed.row), processed.row.params.echo)
            for prompt in processed.prompts:
                tokens.append(prompt.ids)
            for prompt in first_texts:
                result.expected.add(processed.row_index, prompt.prompt_index, processed.row.params.n)
            if result.first_prompt is None and processed.prompts[0].embeds is None:
                result.first_prompt = (processed.id, list(_prompt_ids(processed.prompts[0])))
        table.use_external_tokens(tokens.map())
        tokens.close(keep=True)
    return result


def _prompt_ids(prompt: EncodedPrompt) -> list[int]:
    """The ids before the scored text; all ids if no text is scored."""
    return prompt.ids[: prompt.score_start] if prompt.score_start >= 0 else prompt.ids


def _row_values(
    rows: Iterator[RawRow], raw_by_index: dict[int, RawRow]
) -> Iterator[tuple[int, Mapping[str, Any] | ErrorInfo]]:
    """(row index, value or error) of each row; `raw_by_index` keeps the row until the row reader has processed it."""
    for row in rows:
        # The row reader writes embeddings to disk, so only the row's location is kept here.
        large = row.value is not None and "input_embeds" in row.value
        raw_by_index[row.index] = row._replace(value=None) if large else row
        yield row.index, row.value if row.error is None else row.error  # type: ignore[misc]


def _is_chat(row: ParsedRow) -> bool:
    """Whether the answer is a chat message: the row has messages, or `--chat` made its text one."""
    return isinstance(row.prompts[0], ChatPrompt)


def _bad_row(
    policy: Literal["error-row", "skip", "fail"], error: ErrorInfo, row: ProcessedRow, result: Ingested
) -> None:
    if policy == "fail":
        what = f"{error.code}: {printable(error.message)}"
        raise InputError(f"row {row.row_index} (id {row.id!r}) is invalid: {what}")
    if policy == "skip":
        result.skipped += 1
    else:
        result.errors[error.code] += 1


def _with_location(error: ErrorInfo, raw: RawRow) -> ErrorInfo:
    """Prefix the message with file and line, unless the reader has done so."""
    place = f"{raw.source}, line {raw.line}: "
    return error if error.message.startswith(place) else replace(error, message=place + error.message)


def _carried_json(carry: str | tuple[str, ...], extra: Mapping[str, Any]) -> str | None:
    """JSON for the `extra` column: the unknown keys of a row that `--carry` keeps; None if there are none."""
    if carry == "none":
        return None
    return extra_json(extra if carry == "all" else {key: extra[key] for key in carry if key in extra})
