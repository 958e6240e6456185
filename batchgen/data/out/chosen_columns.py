"""Outputs of `--columns`: some columns of the results, with what the others would be read for in the footer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from batchgen.data.durable_files import write_durably
from batchgen.data.files import size_of
from batchgen.data.lines import first_mark, is_lines
from batchgen.data.out.export import read_line_totals
from batchgen.data.out.view import Totals, read_totals
from batchgen.data.results_file import open_parquet, parquet_writer, read_footer
from batchgen.data.schema import with_footer
from batchgen.data.store.output_budget import OutputBudget
from batchgen.data.store.work_folder import WorkFolder

TOTALS_KEY = "totals"
"""Entry of the run record: the totals of all columns."""


def with_totals(whole: Path, columns: Sequence[str]) -> dict[str, Any]:
    """The run record of some columns of a results file, with its totals."""
    totals = read_totals(whole)
    counts = {field.name: getattr(totals, field.name) for field in fields(totals) if field.name != "first_text"}
    return {**(read_footer(whole) or {}), "columns": [*columns], TOTALS_KEY: counts}


def totals_of(path: Path) -> Totals:
    """The totals of an output: as recorded if it lacks columns, else counted in its rows.

    Raises:
        InputError: the file cannot be read.
    """
    record = first_mark(path) if is_lines(path) else read_footer(path)
    if (totals := (record or {}).get(TOTALS_KEY)) is None:
        return read_line_totals(path) if is_lines(path) else read_totals(path)
    values: dict[str, Any] = {name: Counter(each) if isinstance(each, dict) else each for name, each in totals.items()}
    return Totals(**values)


def publish_columns(work: WorkFolder, whole: Path, columns: Sequence[str], max_bytes: int | None) -> None:
    """Write some columns of a complete results file as the output, atomically.

    Args:
        work: the work folder of the job.
        whole: the complete results, in the folder of temporary files.
        columns: names of columns, in the order to write.
        max_bytes: most bytes of the output.

    Raises:
        OutputError: the disk is full, or the output exceeds `max_bytes`; nothing was replaced.
    """
    temporary = whole.with_name("columns.parquet")
    with open_parquet(whole) as stored:
        chosen = pa.schema([stored.schema.field(name) for name in columns])
        schema = with_footer(with_totals(whole, columns), chosen)

        def write(stream: BinaryIO) -> None:
            with parquet_writer(stream, schema) as parquet:
                for group in stored.groups(columns):
                    parquet.write_table(group.select(columns).replace_schema_metadata(schema.metadata))

        def check() -> None:
            with open_parquet(temporary) as written:
                written.check()
            OutputBudget(max_bytes).check(size_of(temporary))
            work.record_written(temporary)

        write_durably(work.paths.result, write, temporary=temporary, before_rename=check)
