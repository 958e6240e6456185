"""Cache of the tokenised input in the work folder: a resumed run loads it and does not read the rows again.

```
results.parquet.work/tokenized/
├── tokens        token ids of all prompts, int32
├── texts, bad    per row: id, carried fields, prompts; the errors of invalid rows
├── columns.npz   columns of rows and prompts
└── about.json    everything else, written last: the job's key, parameter sets, checksums of the other files
```

A cache that is incomplete, damaged or of another job is ignored.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import orjson

from batchgen import __version__
from batchgen.data.checksums import crc_of
from batchgen.data.durable_files import output_errors, write_durably
from batchgen.data.files import open_new, open_own, remove_file, sync_stream
from batchgen.data.spool import BlobSpool, TokenSpool
from batchgen.data.store.committed import Committed
from batchgen.data.store.sealed_json import sealed, unsealed
from batchgen.data.store.work_folder import WorkFolder
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.job.rows.fingerprint import JobIdentity
from batchgen.job.rows.ingest import BAD, TEXTS, TOKENS, Ingested, RowTexts
from batchgen.job.setup import Setup
from batchgen.media.store import MEDIA_OPTIONS
from batchgen.request.completion import Completion
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.columns import Columns
from batchgen.request.table.request_table import RequestTable

_COLUMNS: Final = "columns.npz"
_ABOUT: Final = "about.json"
_KEPT: Final = ("rows", "skipped", "plain", "truncated", "grammar_backends", "carried_options", "notes")
"""Values of `Ingested` that are kept as they are."""
_MAX_PARAMS: Final = 1 << 16
"""Most parameter sets of a job that is cached: they are all in memory as JSON at once."""
_DEFAULTS: Final = asdict(SamplingParams())


def tokenized_key(identity: JobIdentity, setup: Setup, set_aside: Iterable[int]) -> str:
    """Cache key: the job, and everything else that the parsing and tokenising of a row depends on.

    `set_aside`: rows that were not read, because earlier runs died of them.
    """
    parts = {
        "job": identity.run.key,
        "versions": [__version__, *map(version, ("tokenizers", "transformers"))],
        # Rows may name the model.
        "model": [setup.front_end.name, *sorted(setup.config.engine.served_model_name), setup.config.engine.any_model],
        "events": setup.config.events is not None,
        "media": [getattr(setup.config.engine, name) for name in MEDIA_OPTIONS],
        "clock": setup.front_end.tokenizer.clock_text,
        "set_aside": sorted(set_aside),
    }
    return json.dumps(parts, sort_keys=True, default=str)


def discard_tokenized(folder: Path) -> None:
    """Invalidate the cache, before rows are read into the folder."""
    remove_file(folder / _ABOUT)


def is_cached(rows: Ingested) -> bool:
    """Whether `save_tokenized` saves these rows."""
    return rows.table.embeds_id is None and rows.table.media is None and len(rows.table.params) <= _MAX_PARAMS


def save_tokenized(rows: Ingested, folder: Path, key: str) -> None:
    """Complete the cache whose token ids and texts `ingest` wrote to `folder`.

    Jobs with embeddings, images or sounds, or with very many parameter sets, are not cached.

    Raises:
        OutputError: the cache cannot be written.
    """
    if not is_cached(rows):
        return
    metadata = {
        "key": key,
        "params": list(map(_non_default_params, rows.table.params)),
        "errors": {str(code): count for code, count in rows.errors.items()},
        **{name: getattr(rows, name) for name in _KEPT},
    }
    for spool in (rows.tokens, rows.texts.spool, rows.bad):
        spool.sync()
    with output_errors(folder / _COLUMNS), open_new(folder / _COLUMNS) as stream:
        _write_columns(stream, rows)
        sync_stream(stream)
    metadata["checksums"] = _checksums(folder)
    write_durably(folder / _ABOUT, lambda stream: stream.write(sealed(metadata)))


def _write_columns(stream: BinaryIO, rows: Ingested) -> None:
    """A file as of `np.savez`, of which one column at a time has its full width in memory."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, part in _parts(rows).items():
            for column, values in part.each_column():
                with archive.open(f"{name}.{column}.npy", "w", force_zip64=True) as member:
                    np.save(member, values, allow_pickle=False)


def load_rows(work: WorkFolder, key: str, committed: Committed, setup: Setup) -> Ingested | None:
    """The rows tokenised by an earlier run; None if there is no valid cache or a constraint cannot be compiled now."""
    rows = load_tokenized(work.tokenized, key)
    if rows is None:
        return None
    done = committed.contains(rows.table.row_index, rows.table.prompt_index)
    if setup.front_end.encoder.can_compile(rows.table.constraints(done)):
        return rows
    rows.close()
    return None


def load_tokenized(folder: Path, key: str) -> Ingested | None:
    """The rows cached by an earlier run with the same key; None if there is no valid cache. Reports no bad rows."""
    try:
        with open_own(folder / _ABOUT) as stream:
            metadata = unsealed(stream.read())
        if metadata["key"] != key or metadata["checksums"] != _checksums(folder):
            return None
        with open_own(folder / _COLUMNS) as stream, np.load(stream, allow_pickle=False) as archive:
            return _restore(folder, metadata, archive)
    except Exception:  # whatever is wrong with a cache, the input is read again
        return None


def _restore(folder: Path, metadata: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> Ingested:
    """Build the rows from the cache; raises various errors if its files do not match."""
    with ExitStack() as opened:
        tokens = opened.enter_context(TokenSpool(folder / TOKENS, int(columns["table.offsets"][-1])))
        texts = opened.enter_context(BlobSpool(folder / TEXTS, _PartColumns("texts_spool", columns)))
        bad = opened.enter_context(BlobSpool(folder / BAD, _PartColumns("bad", columns)))
        table = RequestTable(tokens=tokens)
        rows = Ingested(table, tokens, RowTexts(texts), bad)
        for name, part in _parts(rows).items():
            part.restore_columns(_PartColumns(name, columns))
        for name in _KEPT:
            setattr(rows, name, metadata[name])
        rows.errors.update({ErrorCode(code): count for code, count in metadata["errors"].items()})
        table.restore_params([SamplingParams(**values) for values in metadata["params"]])
        opened.pop_all()
    return rows


def report_bad_rows(rows: Ingested, on_error: Callable[[Completion, str, str | None], None]) -> None:
    """Call `on_error` for each bad row, read in this run or cached by an earlier one, as `ingest` does."""
    for index in range(len(rows.bad)):
        row_index, name, extra, code, message, param = orjson.loads(rows.bad[index])
        on_error(Completion(row_index, error=ErrorInfo(ErrorCode(code), message, param)), name, extra)


def _non_default_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults, as JSON values that `SamplingParams` accepts."""
    return {name: value for name, value in asdict(params).items() if value != _DEFAULTS[name]}


def _checksums(folder: Path) -> dict[str, int]:
    """File name -> CRC-32."""
    checksums = {}
    for name in (TOKENS, TEXTS, BAD, _COLUMNS):
        with open_own(folder / name) as stream:
            checksums[name] = crc_of(stream)
    return checksums


def _parts(rows: Ingested) -> Mapping[str, Columns]:
    return {
        "table": rows.table,
        "expected": rows.expected,
        "shapes": rows.shapes,
        "texts": rows.texts,
        "texts_spool": rows.texts.spool,
        "bad": rows.bad,
    }


class _PartColumns(Mapping[str, npt.NDArray[Any]]):
    """The columns of one part, without its prefix; each is read when it is asked for."""

    def __init__(self, part: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._prefix = f"{part}."
        self._columns = columns

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._columns if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
