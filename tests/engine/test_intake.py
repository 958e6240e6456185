"""Rows on their way into a table: what many rows of one id take."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine import intake
from batchgen.engine.intake import Intake
from batchgen.request import RequestTable
from batchgen.rows import RowDefaults
from batchgen.text.encode import Encoder
from batchgen.text.tokenizer import Tokenizer
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB


def test_rows_of_one_id_are_numbered_in_a_look_or_two_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = intake._hash

    def counted(row_id: str) -> int:
        nonlocal looks
        looks += 1
        return real(row_id)

    monkeypatch.setattr(intake, "_hash", counted)
    save_word_tokenizer(tmp_path, VOCAB)
    table = RequestTable()
    rows = Intake(table, Encoder(Tokenizer.load(tmp_path), VOCAB, 64), RowDefaults(), "suffix")
    names = ["a-3", *["a"] * 300, "b", "a-2", "b", *["a"] * 200]
    taken = [row.id for row in rows.feed((i, {"id": name, "input_ids": [5]}) for i, name in enumerate(names))]
    assert len(set(taken)) == len(names)
    assert taken[:4] == ["a-3", "a", "a-2", "a-4"]
    assert looks <= 4 * len(names)
