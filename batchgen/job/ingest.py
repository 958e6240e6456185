"""Reading a job's rows: into the request table, with ids and carried fields spooled to disk."""

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

from batchgen.columns import Columns
from batchgen.config import RunConfig
from batchgen.data.expected import Expected
from batchgen.data.read import InputSet
from batchgen.data.row_shapes import RowShapes
from batchgen.data.rows import RawRow
from batchgen.data.schema import extra_json
from batchgen.data.select import Selection
from batchgen.data.spool import BlobSpool, TokenSpool
from batchgen.engine.intake import Intake, TakenRow
from batchgen.errors import ErrorInfo, InputError
from batchgen.printable import printable
from batchgen.prompts import ChatPrompt
from batchgen.request import Completion, ParsedRow, RequestTable
from batchgen.text.encode import EncodedPrompt

__all__ = ["BAD", "TEXTS", "TOKENS", "Ingested", "RowTexts", "ingest", "selection_of"]

TOKENS, TEXTS, BAD = "tokens", "texts", "bad"
"""Files of token ids, of rows' texts and of bad rows."""


class RowTexts(Columns):
    """What the output says of a row beside its results (id, carried fields, prompts), kept on disk by row index."""

    _columns = ("_rows",)

    def __init__(self, spool: BlobSpool) -> None:
        self.spool = spool
        self._rows = array("q")

    def add(self, row_index: int, row_id: str, extra: str | None, prompts: list[str | None] | None) -> None:
        """Remember a row. Rows come in rising order."""
        self._rows.append(row_index)
        self.spool.append(orjson.dumps([row_id, extra, prompts]))

    def __getitem__(self, row_index: int) -> tuple[str, str | None, list[str | None] | None]:
        rows = self._rows  # of a job without bad rows each stands at its own index
        place = row_index if row_index < len(rows) and rows[row_index] == row_index else bisect_left(rows, row_index)
        blob = self.spool.get(place)
        assert blob is not None
        row_id, extra, prompts = orjson.loads(blob)
        return row_id, extra, prompts


@dataclass(slots=True)
class Ingested:
    """All rows of a job, tokenised. Bad rows are not in the table; `errors` counts them."""

    table: RequestTable
    texts: RowTexts
    bad: BlobSpool
    """Rows that the output holds as errors, as JSON."""
    expected: Expected = field(default_factory=Expected)
    """The keys that the output must hold."""
    shapes: RowShapes = field(default_factory=RowShapes)
    """What its rows were asked as."""
    rows: int = 0
    """Rows taken, bad ones included."""
    skipped: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_prompt: tuple[str, list[int]] | None = None
    """(id, ids) of the first good row's first prompt."""

    def close(self, *, keep: bool = False) -> None:
        """Remove the files of texts and bad rows, or `keep` them for another run."""
        self.texts.spool.close(keep=keep)
        self.bad.close(keep=keep)


def selection_of(config: RunConfig) -> Selection:
    """The rows of the input that the options ask for."""
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
    intake: Intake,
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
        intake: parses and tokenises into `table`.
        table: takes the requests; its tokens go to a memory map of a file.
        folder: takes `tokens`, `texts` and `bad`, which the caller removes.
        decode: ids to text, for `--include-prompt`.
        on_row: called with the rows read so far.
        on_error: called with each bad row's completion, id and carried fields, unless bad rows are skipped.
        on_skipped: called with each bad row that is skipped, as `on_error` with others.

    Raises:
        InputError: a bad row under `--on-bad-row fail`.
    """
    result = Ingested(table, RowTexts(BlobSpool(folder / TEXTS)), BlobSpool(folder / BAD))
    table.spill(np.zeros(0, np.int32))
    raw_rows = inputs.rows(config.prompt_column, config.id_column, selection_of(config))
    places: dict[int, RawRow] = {}
    with TokenSpool(folder / TOKENS) as tokens:
        for taken in intake.feed(_values(raw_rows, places)):
            raw = places.pop(taken.row_index)
            result.rows += 1
            on_row(result.rows)
            extra = carried(config.carry, {**raw.displaced, **taken.extra} if raw.displaced else taken.extra)
            if taken.error is not None:
                error = _located(taken.error, raw)
                _bad_row(config.on_bad_row, error, taken, result)
                bad = Completion(taken.row_index, error=error)
                if config.on_bad_row == "skip":
                    on_skipped(bad, taken.id, extra)
                else:
                    result.expected.add(taken.row_index)
                    result.shapes.add(taken.row_index)
                    result.bad.append(orjson.dumps([taken.row_index, taken.id, extra, *astuple(error)]))
                    on_error(bad, taken.id, extra)
                continue
            assert taken.row is not None
            first_texts = [p for p in taken.prompts if p.text_index == 0]
            prompts = None
            if config.include_prompt:
                prompts = [decode(_prompt_part(p)) if p.embeds is None else None for p in first_texts]
            result.texts.add(taken.row_index, taken.id, extra, prompts)
            result.shapes.add(taken.row_index, _is_chat(taken.row), taken.row.params.echo)
            for prompt in taken.prompts:
                tokens.append(prompt.ids)
            for prompt in first_texts:
                result.expected.add(taken.row_index, prompt.prompt_index, taken.row.params.n)
            if result.first_prompt is None and taken.prompts[0].embeds is None:
                result.first_prompt = (taken.id, list(_prompt_part(taken.prompts[0])))
        table.spill(tokens.map())
        tokens.close(keep=True)
    return result


def _prompt_part(prompt: EncodedPrompt) -> list[int]:
    """The ids in front of the text to score, all where none is."""
    return prompt.ids[: prompt.score_start] if prompt.score_start >= 0 else prompt.ids


def _values(rows: Iterator[RawRow], places: dict[int, RawRow]) -> Iterator[tuple[int, Mapping[str, Any] | ErrorInfo]]:
    """What the intake takes; `places` keeps each row until it comes back out."""
    for row in rows:
        # A row of embeddings is on disk once it is taken; what is kept of it here says where it stood.
        large = row.value is not None and "input_embeds" in row.value
        places[row.index] = row._replace(value=None) if large else row
        yield row.index, row.value if row.error is None else row.error  # type: ignore[misc]


def _is_chat(row: ParsedRow) -> bool:
    """Whether the row's answer is a message: of a conversation, or of text that --chat made one."""
    return isinstance(row.prompts[0], ChatPrompt)


def _bad_row(policy: Literal["error-row", "skip", "fail"], error: ErrorInfo, taken: TakenRow, result: Ingested) -> None:
    if policy == "fail":
        what = f"{error.code}: {printable(error.message)}"
        raise InputError(f"row {taken.row_index} (id {taken.id!r}) is invalid: {what}")
    if policy == "skip":
        result.skipped += 1
    else:
        result.errors[error.code] += 1


def _located(error: ErrorInfo, raw: RawRow) -> ErrorInfo:
    """Say where the row stands, unless the reader said so already."""
    place = f"{raw.source}, line {raw.line}: "
    return error if error.message.startswith(place) else replace(error, message=place + error.message)


def carried(carry: str | tuple[str, ...], extra: Mapping[str, Any]) -> str | None:
    """The `extra` column's JSON: what `--carry` keeps of a row's unknown keys; None when nothing is left."""
    if carry == "none":
        return None
    return extra_json(extra if carry == "all" else {key: extra[key] for key in carry if key in extra})
