"""Parts of a work folder: where they are, whose they are, and whether they hold a finished row."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.data.files import files_in, open_own
from batchgen.data.write.durable_files import part_errors
from batchgen.data.write.schema import FINGERPRINT_KEY


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
    return any(map(_has_result, [*part_files(work), *earlier_parts(work)]))


def _has_result(part: Path) -> bool:
    with suppress(OSError, pa.ArrowException, KeyError, ValueError), part_errors(part), open_own(part) as stream:
        statuses = pq.ParquetFile(stream).read(["status"])["status"]
        return bool(pc.any(pc.equal(statuses, "ok")).as_py())
    return False


def part_owners(work: Path) -> set[str]:
    """Identity keys of the jobs that committed the parts; damaged parts are ignored.

    Raises:
        OutputError: a part that may be intact cannot be read.
    """
    found = set()
    for part in part_files(work):
        with suppress(OSError, pa.ArrowException, KeyError, ValueError), part_errors(part), open_own(part) as stream:
            found.add((pq.ParquetFile(stream).metadata.metadata or {})[FINGERPRINT_KEY].decode())
    return found
