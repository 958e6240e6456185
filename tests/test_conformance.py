"""The conformance table cannot drift: it is made from the tests' tags, and no field goes without a test."""

from __future__ import annotations

from batchgen.fields import FIELDS
from tests import conformance


def test_the_readme_holds_the_generated_table() -> None:
    assert conformance.in_readme() == conformance.table(), "run: python -m tests.conformance"


def test_every_field_has_a_test() -> None:
    """Of what it does, or of its refusal."""
    bare = [name for name in conformance.NAMES if name not in conformance.tagged()]
    assert not bare, f"no test is tagged with {bare}"


def test_tags_name_fields() -> None:
    odd = {name: files for name, files in conformance.tagged().items() if name not in conformance.NAMES}
    assert not odd, "tags take canonical names"


def test_fields_of_several_places_are_built_in_all_or_none() -> None:
    for name in conformance.unbuilt():
        assert not any(field.built for field in FIELDS if field.name == name), name


def test_fields_that_do_something_run_whole() -> None:
    """A field that reaches the engine is proven there, by a run, and by a second file of tests besides."""
    carried = {field.name for field in FIELDS if field.carried}
    for name, files in conformance.tagged().items():
        if name in conformance.unbuilt() | carried | set(conformance.ENVELOPE):
            continue
        assert any(file.startswith(("e2e/", "engine/")) for file in files), f"no run proves `{name}`"
        assert len(files) > 1, f"one file of tests only proves `{name}`"
