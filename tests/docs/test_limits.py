"""The table of budgets in the page of limits: every limit is that of the constant that the row names."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import batchgen
from tests.cases import each

PAGE = Path(batchgen.__file__).parent / "docs" / "limits.md"
UNITS = {"": 1, "characters": 1, "levels": 1, "s": 1, "MiB": 1 << 20, "GiB": 1 << 30}
BUDGETS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.read_text().split("## Budgets")[1].splitlines()
    if re.match(r"\| .* \| `[\w.]+` \|$", line)
]
"""(what, limit, beyond it, constant) of each row."""


@each("limit, constant", [(row[1], row[3].strip("`")) for row in BUDGETS])
def test_a_limit_is_that_of_its_constant(limit: str, constant: str) -> None:
    parts = constant.split(".")
    size = next(place for place, part in enumerate(parts) if not part.islower())
    module = import_module("batchgen." + ".".join(parts[:size]))
    owner = getattr(module, parts[size])() if len(parts) > size + 1 else module  # defaults of a class
    value = getattr(owner, parts[-1])
    number, _, unit = limit.partition(" ")
    assert float(number.replace(",", "")) * UNITS[unit] == value


def test_every_piece_of_work_has_a_row() -> None:
    assert len(BUDGETS) > 20, "no row is lost by another form"
    assert all(what and limit and beyond for what, limit, beyond, _ in BUDGETS)
