"""Parts of a work folder: where they are, whose they are, and whether they hold a finished row."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pyarrow.compute as pc

from batchgen.data.files import files_in
from batchgen.data.results_file import DamagedFile, StoredTable, open_part
from batchgen.data.schema import FINGERPRINT_KEY


def part_files(work: Path) -> list[Path]:
    """Committed parts of a work folder, in order."""
    return files_in(work / "parts", "part-*.parquet")


def earlier_parts(work: Path) -> list[Path]:
    """Parts that jobs with another input left in a work folder, those of the latest job first."""
    return [part for job in reversed(files_in(work / "earlier")) for part in reversed(part_files(job))]


def has_results(work: Path) -> bool:
    """Whether a work folder contains a finished row, failed ones not counted; damaged parts are ignored.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    for part in [*part_files(work), *earlier_parts(work)]:
        with suppress(DamagedFile, KeyError), open_part(part) as table:
            if has_status(table, "ok"):
                return True
    return False


def has_status(table: StoredTable, status: str) -> bool:
    """Whether a row of a results file has a status."""
    return any(pc.any(pc.equal(group["status"], status)).as_py() for group in table.groups(["status"]))


def part_owners(work: Path) -> set[str]:
    """Identity keys of the jobs that committed the parts; damaged parts are ignored.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    owners = set()
    for part in part_files(work):
        with suppress(DamagedFile, KeyError), open_part(part) as table:
            owners.add(table.about[FINGERPRINT_KEY].decode())
    return owners
