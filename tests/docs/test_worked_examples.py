"""The worked examples of `contributing.md` work as written and touch at most four files."""

from __future__ import annotations

from pathlib import Path

from tests.docs.worked_examples import ROOT, copy_repository, follow, run_in

PAGE = ROOT / "batchgen" / "docs" / "contributing.md"
_FIELD = """
from pathlib import Path
from batchgen.cli.app import run_command
from batchgen.config.resolve import resolve_config
from batchgen.errors import RowError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.docs import test_conformance
from tests.docs.conformance import tagged
from tests.request import test_every_field

assert parse_row({"text": "a", "strip_text": True}, 0, RowDefaults()).params.strip_text
assert resolve_config({"inputs": ("a.jsonl",)}, {"BATCHGEN_STRIP_TEXT": "yes"}, Path()).sampling["strip_text"]
try:
    parse_row({"text": "a", "sampling_params": {"strip_text": "yes"}}, 0, RowDefaults())
except RowError as error:
    assert "`strip_text` must be true or false, got 'yes'" in str(error)
else:
    raise AssertionError("a wrong value is accepted")
assert tagged()["strip_text"] == ("engine/test_strip_text.py", "request/test_every_field.py")
assert run_command(["run", "--help", "all"]) == 0
test_every_field.test_options(tmp_path=Path())
for name, test in {**vars(test_conformance), **vars(test_every_field)}.items():
    if name.startswith("test_") and name != "test_options":
        test()
"""

EXAMPLES = {
    "Add a sampling field": "tests/engine/test_strip_text.py",
    "Add a kind of constraint": "tests/text/grammar/test_integer_range.py",
    "Add an attention backend": "tests/kernels/attention/test_sdpa.py",
    "Add a kind of cache group": "tests/plan/test_chunk_group.py",
    "Add an input format": "tests/data/read/test_ltsv.py",
}
"""Heading of an example -> its test."""


def test_the_examples_work_and_touch_at_most_four_files(tmp_path: Path) -> None:
    """The field alone first, with every test of fields, then all examples."""
    copy_repository(tmp_path)
    for heading, test in EXAMPLES.items():
        files = follow(PAGE, heading, tmp_path)
        assert test in files
        assert len(files) <= 4, heading
        if heading == "Add a sampling field":
            assert "--strip-text / --no-strip-text" in run_in(tmp_path, "-c", _FIELD)
    run_in(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *EXAMPLES.values())
