"""Jobs of a model that computes nothing, for checks of whole runs: an engine in this process, and commands.

The model is made once a process, in a folder that is removed with it.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

from batchgen import Engine
from batchgen.data.read.formats import BY_KEY
from batchgen.errors import InputError
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.e2e import instant
from tests.e2e.model import save_model
from tests.e2e.runner import ProcessResult, run
from tests.fuzz.fuzzer import SCRATCH
from tests.fuzz.parsing import require

CONTEXT = 64
_MOST_SAMPLES = 64
_MOST_ROWS = 200
DOCUMENTED = frozenset({0, 2, 3, 4, 5, 6, 7, 75, 130, 143})
"""Exit codes of user errors and of success; 1 is an internal error."""
_FORMATS = {"json-lines": "jsonl", "json-documents": "json", "openai-lines": "jsonl"}


@cache
def scratch() -> Path:
    """A folder of this process in memory, if there is such a file system."""
    given = os.environ.get(SCRATCH)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="batchgen-fuzz-", dir=given or (memory if memory.is_dir() else None)))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def model_folder() -> Path:
    """A checkpoint with a context of `CONTEXT` tokens."""
    return save_model(scratch() / "model", CONTEXT)


@contextmanager
def instant_model(load: Callable[..., Any] = instant.load) -> Iterator[None]:
    """Commands run the model that computes nothing, or one that `load` gives."""
    with patch("batchgen.job.setup.checked_spec", instant.inspect), patch("batchgen.job.setup.load_checked", load):
        yield


def interrupted(words: Sequence[object], folder: Path, steps: int) -> None:
    """Run a job that is stopped, as by SIGUSR1, when its model is asked for the step of this number."""

    class Stopping(instant.InstantModel):
        left = steps

        def hidden(self, inputs: Any) -> Any:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().hidden(inputs)

    with instant_model(lambda checked, spec: Stopping(spec)):
        run(words, folder, 75)


def command(words: Sequence[object], folder: Path, stdin: bytes = b"") -> ProcessResult:
    """Run a command line in `folder`; its exit code is a documented one, and it prints no traceback."""
    with instant_model(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = run(words, folder, None, stdin=stdin, env={"HF_HUB_OFFLINE": "1"})
    require("Traceback" not in done.stderr, "no command prints a traceback:", done.stderr)
    require(done.code in DOCUMENTED, f"exit code {done.code} is for user errors:", done.stderr)
    return done


@cache
def engine() -> Engine:
    """An engine of the model that computes nothing."""
    from batchgen.config.engine_config import EngineConfig
    from batchgen.models.check import check_model
    from batchgen.text.tokens.tokenizer import Tokenizer

    model = instant.InstantModel(instant.inspect(check_model(model_folder())))
    return Engine.from_parts(EngineConfig(model=str(model_folder())), model, Tokenizer.load(model_folder()))


def _is_small(values: Sequence[Any]) -> bool:
    """Whether a run of these rows takes little time."""
    samples, defaults = 0, RowDefaults()
    for value in values:
        try:
            row = parse_row(value, 0, defaults)
        except Exception:
            continue
        samples += row.params.samples * len(row.prompts)
    return samples <= _MOST_SAMPLES and len(values) <= _MOST_ROWS


def check_engine(reader: Callable[..., Any], data: bytes) -> Hashable:
    """Every row that can be read gives its completions, or one error, through `Engine.generate`."""
    try:
        values = [row.value for row in reader(io.BytesIO(data), "in") if row.value is not None]
    except InputError:
        return None
    if not values or not _is_small(values):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(engine().generate(values, ordered=True))
    require({one.row_index for one in found} == set(range(len(values))), "every row has a result:", data)
    keys = [(one.row_index, one.prompt_index, one.sample_index) for one in found]
    require(len(set(keys)) == len(keys), "no result comes twice:", keys)
    for one in found:
        require(one.error is None or one.error.code != "internal", "no row is an internal error:", one.error)
    return frozenset(one.error.code if one.error else one.finish_reason for one in found)


def check_job(name: str, data: bytes) -> Hashable:
    """`batchgen run` writes one row for each row of the file, in order."""
    kind = _FORMATS[name]
    reader = BY_KEY[kind].named_rows or BY_KEY[kind].rows
    rows = list(reader(io.BytesIO(data), "in"))
    if not _is_small([row.value for row in rows if row is not None and row.value is not None]):
        return None
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        (folder / "in").write_bytes(data)
        words = [
            "run",
            "in",
            "--input-format",
            kind,
            "--model",
            model_folder(),
            "-o",
            "out.parquet",
            "--max-errors",
            "100%",
        ]
        done = command([*words, "--events", "events"], folder)
        require(done.code == 0, "a job with any rows is done:", done.stderr)
        table = pq.read_table(folder / "out.parquet", columns=["row_index", "status", "error", "extra"])
        indexes = table["row_index"].to_pylist()
        require(sorted(set(indexes)) == list(range(len(rows))), "every row is in the output:", data)
        require(indexes == sorted(indexes), "the output is in input order:", indexes)
        for row, error in zip(table["row_index"].to_pylist(), table["error"].to_pylist(), strict=True):
            require(error is None or error["code"] != "internal", "no row is an internal error:", (row, error))
        for extra in table["extra"].to_pylist():
            require(extra is None or type(json.loads(extra)) is dict, "carried fields are an object:", extra)
    finally:
        shutil.rmtree(folder)
    return done.code
