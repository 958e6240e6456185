"""What reading a job's input made, kept in its work folder: a run that goes on takes that, and reads no row again.

```
results.parquet.work/reading/
├── tokens        ids of all prompts, int32
├── texts, bad    by row: id, carried fields, prompts; what is wrong with bad rows
└── columns.npz   the rest, written last: which job's it is, and every number that is kept of rows and prompts
```

Whatever is not whole, or not of this job, is as good as absent.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from batchgen import __version__
from batchgen.columns import Columns
from batchgen.config import RunConfig
from batchgen.data.files import sync_file, write_durably
from batchgen.data.spool import BlobSpool
from batchgen.errors import ErrorCode, ErrorInfo, OutputError, RowError
from batchgen.job.identity import JobIdentity
from batchgen.job.ingest import BAD, TEXTS, TOKENS, Ingested, RowTexts
from batchgen.job.setup import Setup
from batchgen.params import SamplingParams
from batchgen.request import Completion, RequestTable

__all__ = ["forget_reading", "keep_reading", "kept_reading", "reading_key", "report_bad"]

_COLUMNS: Final = "columns.npz"
_ABOUT: Final = "about"
"""The member of it that is JSON: the key, the parameter sets, counts."""
_MOST_PARAMS: Final = 1 << 16
"""Parameter sets that are kept: a job in which every row has its own would hold all of them as text at once."""
_DEFAULTS: Final = asdict(SamplingParams())


def reading_key(identity: JobIdentity, config: RunConfig, setup: Setup) -> str:
    """What must be equal for two runs to make the same of the same rows: the job, and what else may refuse a row."""
    about = {
        "job": identity.run.key,
        "versions": [__version__, *map(version, ("tokenizers", "transformers"))],
        "model": setup.model,  # rows may name it
        "events": config.events is not None,
        "media_root": config.engine.media_root,
    }
    return json.dumps(about, sort_keys=True, default=str)


def forget_reading(folder: Path) -> None:
    """Before other rows are read into the folder."""
    (folder / _COLUMNS).unlink(missing_ok=True)


def keep_reading(rows: Ingested, folder: Path, key: str) -> None:
    """Complete what `ingest` left in `folder`. A job with embeddings, or with very many parameter sets, is read again.

    Raises:
        OutputError: it cannot be written.
    """
    if rows.table.embeds_id is not None or len(rows.table.params) > _MOST_PARAMS:
        return
    about = {
        "key": key,
        "params": list(map(_given, rows.table.params)),
        "rows": rows.rows,
        "skipped": rows.skipped,
        "errors": {str(code): count for code, count in rows.errors.items()},
    }
    columns = {
        f"{name}.{column}": values for name, part in _parts(rows).items() for column, values in part.columns().items()
    }
    rows.texts.spool.sync()
    rows.bad.sync()
    sync_file(folder / TOKENS)
    about["checksums"] = _checksums(folder)
    columns[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    write_durably(folder / _COLUMNS, lambda stream: np.savez(stream, **columns))  # type: ignore[arg-type]


def kept_reading(folder: Path, key: str) -> Ingested | None:
    """What an earlier run with the same key kept, its bad rows not reported yet; None where there is none."""
    try:
        with (folder / _COLUMNS).open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            about = json.loads(kept[_ABOUT].tobytes())
            if about["key"] != key or about["checksums"] != _checksums(folder):
                return None
            columns = {name: kept[name] for name in kept.files}
        return _ingested(folder, about, columns)
    except (OSError, EOFError, OutputError, RowError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
        return None


def _ingested(folder: Path, about: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> Ingested:
    """The rows again; raises a variety of errors where not everything fits together."""
    table = RequestTable()
    with ExitStack() as opened:
        texts = opened.enter_context(BlobSpool(folder / TEXTS, _of("texts_spool", columns)))
        bad = opened.enter_context(BlobSpool(folder / BAD, _of("bad", columns)))
        rows = Ingested(table, RowTexts(texts), bad, rows=about["rows"], skipped=about["skipped"])
        for name, part in _parts(rows).items():
            part.fill(_of(name, columns))
        rows.errors.update({ErrorCode(code): count for code, count in about["errors"].items()})
        params = [SamplingParams(**given) for given in about["params"]]
        table.take(params, _tokens(folder / TOKENS, int(table.offsets[-1])))
        opened.pop_all()
    return rows


def report_bad(rows: Ingested, on_error: Callable[[Completion, str, str | None], None]) -> None:
    """Call `on_error` with each bad row that was read, in this run or an earlier one, as `ingest` does."""
    for index in range(len(rows.bad)):
        row_index, name, extra, code, message, param = orjson.loads(rows.bad.get(index) or b"")
        on_error(Completion(row_index, error=ErrorInfo(ErrorCode(code), message, param)), name, extra)


def _given(params: SamplingParams) -> dict[str, Any]:
    """The fields that say something, as JSON takes them and `SamplingParams` takes them back."""
    return {name: value for name, value in asdict(params).items() if value != _DEFAULTS[name]}


def _checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file beside the columns, which has its own; a changed token would be another prompt, unnoticed."""
    found = {}
    for name in (TOKENS, TEXTS, BAD):
        found[name] = 0
        with (folder / name).open("rb") as stream:
            while piece := stream.read(1 << 20):
                found[name] = zlib.crc32(piece, found[name])
    return found


def _tokens(path: Path, count: int) -> npt.NDArray[np.int32]:
    """[count] ids of a file that holds no others."""
    if path.stat().st_size != 4 * count:
        raise ValueError(f"{path} has another size")
    return np.memmap(path, np.int32, mode="r") if count else np.zeros(0, np.int32)


def _parts(rows: Ingested) -> Mapping[str, Columns]:
    return {
        "table": rows.table,
        "expected": rows.expected,
        "shapes": rows.shapes,
        "texts": rows.texts,
        "texts_spool": rows.texts.spool,
        "bad": rows.bad,
    }


def _of(part: str, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of one part."""
    return {name.partition(".")[2]: values for name, values in columns.items() if name.startswith(f"{part}.")}
