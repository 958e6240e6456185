"""Ingestion: all rows of a job parsed and tokenised into the request table, their ids and texts spooled to disk."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchgen.data.carry import Carry
from batchgen.data.lines import is_lines
from batchgen.data.read.input_set import InputSet, NamedFields
from batchgen.data.row_shapes import RowShapes
from batchgen.data.schema import extra_json
from batchgen.data.spool import BlobSpool, TokenSpool
from batchgen.data.store.expected import ExpectedKeys
from batchgen.engine.advice import input_advice
from batchgen.engine.row_reader import ProcessedRow, ReadRecord
from batchgen.errors import InputError, UsageError
from batchgen.job.preflight import carry_of, selection_of
from batchgen.job.setup import Setup
from batchgen.request.completion import Completion
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.printable import printable
from batchgen.request.table.columns import Column, Columns
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import RequestTable
from batchgen.text.encode import EncodedPrompt

TOKENS, TEXTS, BAD = "tokens", "texts", "bad"
"""File names of the token ids, the rows' texts and the bad rows."""

OnBadRow = Callable[[Completion, str, str | None], None]
"""Called with the completion, id and carried fields of a bad row."""


class RowTexts(Columns):
    """Id, carried fields and prompt texts of each good row, on disk, by row index: the output needs them again."""

    _columns = ("_rows",)

    def __init__(self, spool: BlobSpool) -> None:
        self.spool = spool
        self._rows = Column("q")

    def add(self, row_index: int, texts: bytes) -> None:
        """Add a row: JSON of its id, carried fields and prompt texts. Rows must come in ascending order."""
        self.pack(self._rows)
        self._rows.append(row_index)
        self.spool.append(texts)

    def __getitem__(self, row_index: int) -> tuple[str, str | None, list[str | None] | None]:
        rows = self._rows  # without bad rows, each row is at its own index
        place = row_index if row_index < len(rows) and rows[row_index] == row_index else bisect_left(rows, row_index)
        row_id, extra, prompts = orjson.loads(self.spool[place])
        return row_id, extra, prompts


@dataclass(slots=True)
class Ingested:
    """All rows of a job, tokenised. Bad rows are not in `table`; `errors` counts them."""

    table: RequestTable
    tokens: TokenSpool
    """Token ids of the table."""
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
    carried_options: dict[str, int] = field(default_factory=dict)
    """Carried key that looks like an option -> number of rows."""
    first_prompt: list[int] | None = None
    """Token ids of the first good row's first prompt."""
    plain: int = 0
    """Number of good native rows whose prompt is text that no chat template was applied to."""
    truncated: int = 0
    """Number of prompts that were truncated."""
    grammar_backends: dict[str, int] = field(default_factory=dict)
    """Grammar compiler (`xgrammar`, `llguidance`) -> number of distinct constraints that it compiled."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of options that had no effect."""

    def advice(self, setup: Setup) -> list[str]:
        """Advice on the rows."""
        good = self.rows - self.skipped - self.errors.total()
        is_plain = 0 < good <= self.plain and setup.config.chat is None
        return input_advice(self.table, setup.front_end.tokenizer, is_plain=is_plain, truncated=self.truncated)

    def close(self, *, keep: bool = False) -> None:
        """Close the files of token ids, texts and bad rows; remove them unless `keep`.

        Token ids stay readable.
        """
        for spool in (self.tokens, self.texts.spool, self.bad):
            spool.close(keep=keep)


def ingest(
    setup: Setup,
    inputs: InputSet,
    folder: Path,
    scratch: Path,
    on_row: Callable[[int], None] = lambda rows: None,
    record: ReadRecord | None = None,
    on_bad: OnBadRow = lambda completion, row_id, extra: None,
) -> Ingested:
    """Read, parse and tokenise every row.

    Args:
        setup: the options of the job, and the front end that parses and tokenises its rows.
        inputs: the opened files.
        folder: receives the files `tokens`, `texts` and `bad`, which the caller removes.
        scratch: receives the embeddings given in rows, in a file that has no name.
        on_row: called with the number of rows read so far.
        record: receives which rows are being read.
        on_bad: called for each bad row, also for those that are skipped.

    Raises:
        InputError: a row is bad, with `--on-bad-row fail`.
        UsageError: no row has a field that `--id-column` or its like names. If only some rows are selected, others may
            have it, and a note says so; likewise for `--carry`, whose fields may be absent.
    """
    config = setup.config
    tokens = TokenSpool(folder / TOKENS)
    table = RequestTable(EmbedsStore(setup.spec.embeds_size, scratch), tokens)
    result = Ingested(table, tokens, RowTexts(BlobSpool(folder / TEXTS)), BlobSpool(folder / BAD))
    reader = setup.front_end.row_reader(table, setup.defaults, config.on_duplicate_id)
    carry = carry_of(config)
    selection = selection_of(config)
    carried = (
        {} if isinstance(carry, str) else {name: "--carry" if name in config.carry else "--columns" for name in carry}
    )
    wanted = NamedFields({**carried, **setup.columns.wanted()})
    decode = setup.decode_prompt if config.include_prompt else None
    try:
        raw = inputs.rows(setup.columns, selection, wanted)
        for row in reader.read(raw, lambda row: _prepared(row, carry, decode), record):
            result.rows += 1
            on_row(result.rows)
            if row.is_line and config.columns and is_lines(config.output):
                problem = "its OpenAI lines are answered as a whole; leave out --columns, or name OUT.parquet"
                raise UsageError(f"`--columns` with -o {config.output}: {problem}")
            if row.error is not None:
                _add_bad(result, row, config.on_bad_row, on_bad)
            else:
                _add_good(result, row)
            del row  # so that a large row is gone when the next is read
        for option, problem in wanted.problems("the input" if selection.selects_all else "the selection of rows"):
            if option != "--carry" and selection.selects_all:
                raise UsageError(problem)
            result.notes.append(problem)
        result.notes += setup.front_end.notes
        result.truncated = setup.front_end.encoder.truncated
        result.grammar_backends = dict(sorted(setup.front_end.grammars.backends.items()))
        result.carried_options = dict(setup.defaults.carried_options.rows)
        tokens.ids()  # mapped, so that the ids stay readable when the file is closed
    except BaseException:
        result.close()
        raise
    return result


class _Prepared(NamedTuple):
    """What the output needs of a row in addition to its result."""

    extra: str | None
    """Its carried fields, as JSON"""
    texts: bytes
    """Its entry in `RowTexts`; empty for a row with an error"""


def _prepared(row: ProcessedRow, carry: Carry, decode: Callable[[list[int]], str] | None) -> _Prepared:
    """Everything of a row that may raise, before the row is counted; `decode`: gives the texts of prompts, if asked."""
    extra = _carried_json(carry, {**row.raw.displaced, **row.extra} if row.raw.displaced else row.extra)
    if row.error is not None:
        return _Prepared(extra, b"")
    prompts = None
    if decode is not None:
        firsts = [prompt for prompt in row.prompts if prompt.text_index == 0]
        prompts = [decode(_prompt_ids(prompt)) if prompt.embeds is None else None for prompt in firsts]
    return _Prepared(extra, orjson.dumps([row.id, extra, prompts]))


def _add_bad(result: Ingested, row: ProcessedRow, action: str, on_bad: OnBadRow) -> None:
    assert row.error is not None
    error, index = row.raw.locate(row.error), row.raw.index
    extra = None if row.prepared is None else row.prepared.extra
    if action == "fail":
        what = f"{error.code}: {printable(error.message)}"
        raise InputError(f"row {index} (id {row.id!r}) is invalid: {what}")
    if action == "skip":
        result.skipped += 1
    else:
        result.errors[error.code] += 1
        result.expected.add(index)
        result.shapes.add(index, line=row.is_line)
        result.bad.append(orjson.dumps([index, row.id, extra, *astuple(error)]))
    on_bad(Completion(index, error=error), row.id, extra)


def _add_good(result: Ingested, row: ProcessedRow) -> None:
    assert row.row is not None
    index = row.raw.index
    first_texts = [prompt for prompt in row.prompts if prompt.text_index == 0]
    result.texts.add(index, row.prepared.texts)
    parsed, first = row.row, row.row.prompts[0]
    result.plain += parsed.is_plain
    # The answer is a chat message if the row has messages, or `--chat` made its text one.
    result.shapes.add(index, isinstance(first, ChatPrompt), parsed.params.echo, row.is_line)
    for prompt in first_texts:
        result.expected.add(index, prompt.prompt_index, parsed.params.n)
    if result.first_prompt is None and first_texts[0].embeds is None:
        result.first_prompt = _prompt_ids(first_texts[0])


def _prompt_ids(prompt: EncodedPrompt) -> list[int]:
    """The ids before the scored text; all ids if no text is scored."""
    return list(prompt.ids[: prompt.score_start] if prompt.score_start >= 0 else prompt.ids)


def _carried_json(carry: Carry, extra: Mapping[str, Any]) -> str | None:
    """JSON for the `extra` column: the unknown keys of a row that `--carry` keeps; None if there are none."""
    if carry == "none":
        return None
    return extra_json(extra if carry == "all" else {key: extra[key] for key in carry if key in extra})
