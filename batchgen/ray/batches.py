"""`BatchJobs`: a job of `batchgen run` for each batch of rows, all with one engine."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.config.python_words import python_errors, refuse_unknown
from batchgen.config.resolve import resolve_config
from batchgen.config.run_config import OPTIONS
from batchgen.config.units import Threshold
from batchgen.data.read.formats import InputFormat
from batchgen.data.read.input_files import InputFile
from batchgen.data.read.input_set import InputSet
from batchgen.data.read.parquet import named_twice
from batchgen.data.read.pieces import RowFilter
from batchgen.data.schema import SCHEMA
from batchgen.data.store.lock import HeldError
from batchgen.errors import UsageError
from batchgen.job.display.progress import make_progress
from batchgen.job.finished import OpenedCommand
from batchgen.job.preflight import CheckedJob, check_engine_model
from batchgen.job.rows.fingerprint import identify_job
from batchgen.job.run import run_job
from batchgen.job.setup import prepare
from batchgen.job.signals import StopRequest
from batchgen.request.fields.named_columns import UNNAMED, NamedColumns
from batchgen.request.processors import load_processors
from batchgen.request.rows.raw_row import RawRow, UnreadableRow
from batchgen.tables.arrow_values import columns_of_text, read_rows
from batchgen.tables.text_fields import TextFields

_NAME: Final = "batch"
_OF_RUN: Final = (
    "prompt_column", "prompt_template", "id_column", "image_column", "audio_column", "chat", "system", "truncate",
    "on_duplicate_id", "strict_fields", "retry_errors", "sampling_defaults",
)  # fmt: skip
_KNOWN: Final = (*_OF_RUN, *(option.name for option in OPTIONS if option.target in ("engine", "sampling")))
_COLUMNS: Final = [name for name in SCHEMA.names if name not in ("row_index", "dedup_of", "extra")]
"""Columns that mean something outside the output of one job."""
_READ_ROWS: Final = 1024
_WAIT_SECONDS: Final = 1.0


class BatchJobs:
    """Runs the jobs. Two batches with equal rows are the same job."""

    def __init__(
        self, model: str, columns: Sequence[str], work_dir: str | PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        """Load the model. Arguments and errors are those of `BatchgenStage`."""
        if unknown := next((name for name in columns if name not in _COLUMNS), None):
            raise UsageError(f"`columns`: {unknown!r} cannot be added; there are {', '.join(_COLUMNS)}")
        refuse_unknown(options, "BatchgenStage", ["model", "columns", "prefix", "work_dir", *_KNOWN])
        self._folder = None if work_dir is None else Path(work_dir).absolute()
        named = {"inputs": (_NAME,), "output": f"{_NAME}.parquet", "model": str(model)}
        with python_errors(), TemporaryDirectory() as nowhere:
            threads = os.environ.get("OMP_NUM_THREADS", "")  # as many as Ray gives to the actor
            own = {"cpu_threads": int(threads)} if threads.isdecimal() and int(threads) else {}
            config = resolve_config({**own, **options, **named}, {}, Path(nowhere))  # no file of options
            texts = {"include_prompt": "prompt" in columns, "include_prompt_ids": "prompt_ids" in columns}
            config = replace(config, carry="none", max_errors=Threshold(share=1.0), **texts)  # type: ignore[arg-type]
            checked = check_engine_model(config.engine)
            processors = load_processors(config.engine.logit_processor)
            self._job = CheckedJob(config, checked, (), processors, checked.hashes())
            self._setup = prepare(self._job, lambda note: None)
            self._engine = self._setup.load_engine()

    def run(self, batch: pa.Table) -> pa.Table:
        """The results of a batch, in the order of its rows and their samples.

        Raises:
            BatchgenError: as a job that ends early.
        """
        with python_errors(), TemporaryDirectory(prefix="batchgen-") as scratch:
            folder = self._folder or Path(scratch)
            inputs = _as_input(batch)
            name = identify_job(self._setup, inputs).run.fingerprint
            config = replace(self._job.config, output=folder / f"{name}.parquet")
            loaded = replace(self._setup, config=config), self._engine
            command = OpenedCommand(replace(self._job, config=config), inputs, (), loaded)
            while True:
                try:
                    run_job(command, StopRequest(), make_progress("none"), time.monotonic())
                    return pq.read_table(config.output)
                except HeldError:  # another actor has an equal batch
                    time.sleep(_WAIT_SECONDS)


@dataclass(frozen=True, slots=True)
class _TableFile(InputFile):
    """A table in the place of a file; its format has the rows."""

    def open_raw(self) -> BinaryIO:
        return io.BytesIO()

    def check_unchanged(self) -> None:
        pass


def _as_input(table: pa.Table) -> InputSet:
    """The rows of a table, which are those of a Parquet file of it.

    Raises:
        UsageError: two columns have the same name.
    """
    if twice := named_twice(table.column_names):
        raise UsageError(f"two columns of the batch are named {twice!r}; rename one of them")
    table = table.replace_schema_metadata(None).combine_chunks()

    def rows(
        stream: BinaryIO, source: str, first_index: int = 0, keep: RowFilter | None = None,
        columns: NamedColumns = UNNAMED,
    ) -> Iterator[RawRow]:  # fmt: skip
        fields = TextFields(columns_of_text(table.schema), named=columns.fields())
        values = (value for part in table.to_batches(_READ_ROWS) for value in read_rows(part, fields, columns))
        for row, value in enumerate(values):
            raw = RawRow(first_index + row, source, row + 1, unit="row")
            if isinstance(value, UnreadableRow):
                yield raw.with_error(value.info.code, value.info.message).with_readable(value.readable)
            else:
                yield raw._replace(value=value)

    content = pa.BufferOutputStream()
    with pa.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table)
    data = content.getvalue()
    format = InputFormat("table", "an Arrow table", (), rows, None, lambda stream, source: table.schema)
    return InputSet([_TableFile(_NAME, format, None, data.size, sha256(data).hexdigest(), None, (0, 0, 0))])
