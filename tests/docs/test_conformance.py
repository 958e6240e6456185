"""The conformance table: every field has tests, and tags name only fields that exist."""

from __future__ import annotations

import re

from batchgen.request.fields.declared import FIELDS, HANDLING, LOOKUP
from tests.docs import conformance


def test_every_field_has_a_test() -> None:
    """A test of its effect, or of the error that refuses it."""
    untested = [name for name in conformance.NAMES if name not in conformance.tests_of()]
    assert not untested, f"no test is tagged with {untested}"


def test_tags_name_fields() -> None:
    unknown = {name: files for name, files in conformance.tests_of().items() if name not in conformance.NAMES}
    assert not unknown, "tags must be canonical names of fields"


def test_fields_of_several_places_are_supported_in_all_or_none() -> None:
    for name in conformance.unsupported():
        assert not any(field.supported for field in FIELDS if field.name == name), name


def test_fields_that_reach_the_engine_are_tested_by_a_run_and_by_a_second_test() -> None:
    """In addition to the wrong values of every field."""
    carried = {field.name for field in FIELDS if field.carried}
    for name, files in conformance.tests_of().items():
        if name in conformance.unsupported() | carried | {*HANDLING, *conformance.ENVELOPE}:
            continue
        assert any(file.startswith(("e2e/", "engine/")) for file in files), f"no run is tagged with `{name}`"
        assert len(files) > 1, f"only one test is tagged with `{name}`"


def test_the_fields_page_lists_every_field_of_a_row() -> None:
    page = (conformance.ROOT / "batchgen" / "docs" / "fields.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    listed = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert set(LOOKUP["row"]) <= listed
    known = {name for table in LOOKUP.values() for name in table}
    assert listed <= known | {"messages"}, listed - known
