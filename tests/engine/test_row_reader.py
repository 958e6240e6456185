"""`RowReader`: many rows with the same id."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine import row_reader as intake
from batchgen.engine.row_reader import RowReader
from batchgen.request.parser import RowDefaults
from batchgen.request.raw_row import RawRow
from batchgen.request.table import RequestTable
from batchgen.text.encode import Encoder
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB


def test_numbering_duplicate_ids_needs_few_lookups_per_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    real = intake._hash

    def counted(row_id: str) -> int:
        nonlocal lookups
        lookups += 1
        return real(row_id)

    monkeypatch.setattr(intake, "_hash", counted)
    save_word_tokenizer(tmp_path, VOCAB)
    table = RequestTable()
    row_reader = RowReader(table, Encoder(Tokenizer.load(tmp_path), VOCAB, 64), RowDefaults(), "suffix")
    names = ["a-3", *["a"] * 300, "b", "a-2", "b", *["a"] * 200]
    rows = (RawRow(i, value={"id": name, "input_ids": [5]}) for i, name in enumerate(names))
    ids = [row.id for row in row_reader.read(rows)]
    assert len(set(ids)) == len(names)
    assert ids[:4] == ["a-3", "a", "a-2", "a-4"]
    assert lookups <= 4 * len(names)
