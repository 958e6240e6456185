"""`RowReader`: many rows with the same id."""

from __future__ import annotations

from pathlib import Path

from batchgen.engine.row_reader import RowReader
from batchgen.request.parser import RowDefaults
from batchgen.request.raw_row import RawRow
from batchgen.request.table import RequestTable
from batchgen.text.encode import Encoder
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB


def test_duplicate_ids_get_the_first_free_number(tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path, VOCAB)
    row_reader = RowReader(RequestTable(), Encoder(Tokenizer.load(tmp_path), VOCAB, 64), RowDefaults(), "suffix")
    names = ["a-3", *["a"] * 300, "b", "a-2", "b", *["a"] * 200]
    ids = [row.id for row in row_reader.read(RawRow(i, value={"id": n, "input_ids": [5]}) for i, n in enumerate(names))]
    assert len(set(ids)) == len(names)
    assert ids[:4] == ["a-3", "a", "a-2", "a-4"]
