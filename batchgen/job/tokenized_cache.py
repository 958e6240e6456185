"""Cache of the tokenised input in the work folder: a resumed run loads it and does not read the rows again.

```
results.parquet.work/tokenized/
├── tokens        token ids of all prompts, int32
├── texts, bad    per row: id, carried fields, prompts; the errors of invalid rows
└── columns.npz   everything else, written last: the job's key, parameter sets, columns of rows and prompts
```

A cache that is incomplete or of another job is ignored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from batchgen import __version__
from batchgen.data.files import open_own, remove_file
from batchgen.data.write.durable_files import write_durably
from batchgen.data.write.spool import BlobSpool, TokenSpool
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.job.fingerprint import JobIdentity
from batchgen.job.ingest import BAD, TEXTS, TOKENS, Ingested, RowTexts
from batchgen.job.setup import Setup
from batchgen.request.columns import Columns
from batchgen.request.completion import Completion
from batchgen.request.foreign_text import read_json
from batchgen.request.params import SamplingParams
from batchgen.request.table import RequestTable

_COLUMNS: Final = "columns.npz"
_METADATA: Final = "about"
"""Name of the member of `columns.npz` that holds JSON: the key, parameter sets, counts, checksums."""
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
        "media_root": setup.config.engine.media_root,
        "clock": setup.front_end.tokenizer.clock_text,
        "set_aside": sorted(set_aside),
    }
    return json.dumps(parts, sort_keys=True, default=str)


def discard_tokenized(folder: Path) -> None:
    """Invalidate the cache, before rows are read into the folder."""
    remove_file(folder / _COLUMNS)


def save_tokenized(rows: Ingested, folder: Path, key: str) -> None:
    """Complete the cache whose token ids and texts `ingest` wrote to `folder`.

    Jobs with embeddings, or with very many parameter sets, are not cached.

    Raises:
        OutputError: the cache cannot be written.
    """
    if rows.table.embeds_id is not None or len(rows.table.params) > _MAX_PARAMS:
        return
    metadata = {
        "key": key,
        "params": list(map(_non_default_params, rows.table.params)),
        "rows": rows.rows,
        "skipped": rows.skipped,
        "plain": rows.plain,
        "truncated": rows.truncated,
        "errors": {str(code): count for code, count in rows.errors.items()},
        "grammar_backends": rows.grammar_backends,
        "carried_options": rows.carried_options,
    }
    columns = {
        f"{name}.{column}": values for name, part in _parts(rows).items() for column, values in part.columns().items()
    }
    for spool in (rows.tokens, rows.texts.spool, rows.bad):
        spool.sync()
    metadata["checksums"] = _checksums(folder)
    columns[_METADATA] = np.frombuffer(json.dumps(metadata).encode(), np.uint8)
    write_durably(folder / _COLUMNS, lambda stream: np.savez(stream, **columns))  # type: ignore[arg-type]


def load_tokenized(folder: Path, key: str) -> Ingested | None:
    """The rows cached by an earlier run with the same key; None if there is no valid cache. Reports no bad rows."""
    try:
        with open_own(folder / _COLUMNS) as stream, np.load(stream, allow_pickle=False) as archive:
            metadata = read_json(archive[_METADATA].tobytes())
            if metadata["key"] != key or metadata["checksums"] != _checksums(folder):
                return None
            columns = {name: archive[name] for name in archive.files}
        return _restore(folder, metadata, columns)
    except Exception:  # whatever a cache raises, it is read again
        return None


def _restore(folder: Path, metadata: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> Ingested:
    """Build the rows from the cache; raises various errors if its files do not match."""
    with ExitStack() as opened:
        tokens = opened.enter_context(TokenSpool(folder / TOKENS, int(columns["table.offsets"][-1])))
        texts = opened.enter_context(BlobSpool(folder / TEXTS, _columns_of("texts_spool", columns)))
        bad = opened.enter_context(BlobSpool(folder / BAD, _columns_of("bad", columns)))
        table = RequestTable(tokens=tokens)
        rows = Ingested(table, tokens, RowTexts(texts), bad)
        rows.rows, rows.skipped = metadata["rows"], metadata["skipped"]
        rows.plain, rows.truncated = metadata["plain"], metadata["truncated"]
        for name, part in _parts(rows).items():
            part.restore_columns(_columns_of(name, columns))
        rows.grammar_backends = metadata["grammar_backends"]
        rows.carried_options.update(metadata["carried_options"])
        rows.errors.update({ErrorCode(code): count for code, count in metadata["errors"].items()})
        table.restore_params([SamplingParams(**given) for given in metadata["params"]])
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
    """File name -> CRC-32, for the files without internal checksums: a changed token id would go unnoticed."""
    checksums = {}
    for name in (TOKENS, TEXTS, BAD):
        checksums[name] = 0
        with open_own(folder / name) as stream:
            while chunk := stream.read(1 << 20):
                checksums[name] = zlib.crc32(chunk, checksums[name])
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


def _columns_of(part: str, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of one part, without its prefix."""
    return {name.partition(".")[2]: values for name, values in columns.items() if name.startswith(f"{part}.")}
