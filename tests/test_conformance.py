"""The conformance table cannot drift: it is made from the tests' tags, and no field goes without a test."""

from __future__ import annotations

from batchgen.fields import FIELDS
from tests import conformance


def test_the_readme_holds_the_generated_table() -> None:
    assert conformance.in_readme() == conformance.table(), "run: python -m tests.conformance"


def test_every_field_that_is_built_has_a_test() -> None:
    bare = [name for name in conformance.NAMES if name not in conformance.unbuilt() | conformance.tagged().keys()]
    assert not bare, f"no test is tagged with {bare}"


def test_tags_name_fields() -> None:
    odd = {name: files for name, files in conformance.tagged().items() if name not in conformance.NAMES}
    assert not odd, "tags take canonical names"


def test_fields_of_several_places_are_built_in_all_or_none() -> None:
    for name in conformance.unbuilt():
        assert not any(field.built for field in FIELDS if field.name == name), name
