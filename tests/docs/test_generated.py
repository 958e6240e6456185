"""No generated part of the documentation is stale."""

from __future__ import annotations

import pytest

from tests.docs.generated import PARTS, Part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page.stem} {part.name}")
def test_the_generated_part_is_up_to_date(part: Part) -> None:
    assert part.page.read_text(encoding="utf-8") == part.expected(), "run: python -m tests.docs.generated"
