"""`RowReader`: many rows with the same id."""

from __future__ import annotations

import sys
from pathlib import Path

from batchgen.engine.row_reader import RowReader
from batchgen.request.raw_row import RawRow
from batchgen.request.row_values import RowDefaults
from batchgen.request.table import RequestTable
from batchgen.text.encode import Encoder
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB


def test_duplicate_ids_get_the_first_free_number_at_a_constant_cost(tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path, VOCAB)
    encoder = Encoder(Tokenizer.load(tmp_path), VOCAB, 64)

    def read(copies: int) -> int:
        """The number of Python calls that rows with the same id take."""
        names = ["a-3", *["a"] * copies, "b", "a-2", "b", *["a"] * copies]
        rows = (RawRow(i, value={"id": name, "input_ids": [5]}) for i, name in enumerate(names))
        events: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda _, event, __: events.append(event))
        try:
            ids = [row.id for row in RowReader(RequestTable(), encoder, RowDefaults(), "suffix").read(rows)]
        finally:
            sys.setprofile(before)
        assert len(set(ids)) == len(names)
        assert ids[:4] == ["a-3", "a", "a-2", "a-4"]
        return events.count("call")

    read(4)
    assert read(600) < 2.2 * read(300)
