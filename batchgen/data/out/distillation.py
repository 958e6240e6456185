"""Teacher distributions for distillation: the top logprobs of results as packed pairs, and the reader of such files.

A pair of a token id and its logprob is one uint32. The low `id_bits` bits are the id. The bits above them are a code c
of the logprob -c * `step`; the highest code is minus infinity. `id_bits` is what the largest id of the file needs, and
the codes of all the other bits cover 0 to -`_LEAST` nats, so a logprob in this range is off by at most `step` / 2. A
lower one is read as -`_LEAST`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.out.export import ExportCounts
from batchgen.data.out.view import Results, read_errors
from batchgen.data.results_file import TableWriter, open_parquet
from batchgen.data.schema import KEY_COLUMNS, SCHEMA
from batchgen.errors import InputError
from batchgen.request.foreign_text import read_json

_LEAST: Final = 32.0
_KEY: Final = b"batchgen.kd"
"""Footer key: `id_bits` and `step`, a JSON object."""
_TOP: Final = ("input_top_ids", "output_top_ids", "input_top_logprobs", "output_top_logprobs")
_KEPT: Final = ("id", *KEY_COLUMNS)
_READ: Final = (*_KEPT, "error", "prompt_ids", "output_ids", "input_logprobs", *_TOP)
_OWN: Final = {"input_ids": pa.list_(pa.int32()), "first": pa.int32(), "pairs": pa.list_(pa.uint32())}
_SCHEMA: Final = pa.schema([*map(SCHEMA.field, _KEPT), *_OWN.items()])
_ROWS: Final = 256
"""Most samples of a row group."""


def pack(ids: npt.NDArray[Any], logprobs: npt.NDArray[Any], id_bits: int) -> npt.NDArray[np.uint32]:
    """Pairs of ids below 2 ** `id_bits` and logprobs, of one shape."""
    highest, step = _coding(id_bits)
    codes = np.clip(np.rint(-logprobs.astype(np.float64) / step), 0, highest - 1)
    codes[np.isneginf(logprobs)] = highest
    return (codes.astype(np.uint32) << np.uint32(id_bits)) | ids.astype(np.uint32)


def unpack(pairs: npt.NDArray[np.uint32], id_bits: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The ids and the logprobs of pairs, in their shape."""
    codes, (highest, step) = pairs >> np.uint32(id_bits), _coding(id_bits)
    logprobs = (codes * -step).astype(np.float32)
    logprobs[codes == highest] = -np.inf
    return (pairs & np.uint32((1 << id_bits) - 1)).astype(np.int64), logprobs


def _coding(id_bits: int) -> tuple[int, float]:
    """The highest code, and the step."""
    highest = (1 << (32 - id_bits)) - 1
    return highest, _LEAST / (highest - 1)


def write_kd(results: Results, stream: BinaryIO) -> ExportCounts:
    """Write the samples that have top logprobs, with the ids of prompt and output.

    Raises:
        InputError: no sample has top logprobs, or one has no `prompt_ids`.
    """
    id_bits = max(1, _largest_id(results).bit_length())
    about = {_KEY: json.dumps({"id_bits": id_bits, "step": _coding(id_bits)[1]}).encode()}
    counts, schema = ExportCounts(), _SCHEMA.with_metadata(about)
    options = {"use_dictionary": False, "write_statistics": ["row_index"]}
    with TableWriter(stream, schema, column_encoding={"pairs.list.element": "BYTE_STREAM_SPLIT"}, **options) as writer:
        for batch in _batches(results, _READ):
            counts.errors += len(batch) - batch["error"].null_count
            every = ({name: batch[name][index] for name in _READ} for index in range(len(batch)))
            rows = [_sample(row, id_bits) for row in every if any(len(_values(row[name])) for name in _TOP[:2])]
            counts.left_out += len(batch) - len(rows)
            counts.lines += len(rows)
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
    counts.left_out -= counts.errors
    if not counts.lines:
        raise InputError(
            "no sample has top logprobs. Run the job with --return-logprob --top-logprobs-num K --include-prompt-ids"
        )
    return counts


def _batches(results: Results, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    for file in results.files:
        with read_errors(file), open_parquet(file) as stored:
            for table in stored.groups(columns):
                yield from table.to_batches(_ROWS)


def _largest_id(results: Results) -> int:
    lists = (batch[name] for batch in _batches(results, _TOP[:2]) for name in _TOP[:2])
    return max((pc.max(pc.list_flatten(each)).as_py() or 0 for each in lists), default=0)


def _values(scalar: pa.Scalar) -> npt.NDArray[Any]:
    """The numbers of a list, without the nulls of the first prompt token; none if it is null."""
    if not scalar.is_valid:
        return np.zeros(0, np.int32)
    numbers: npt.NDArray[Any] = scalar.values.slice(scalar.values.null_count).to_numpy(zero_copy_only=False)
    return numbers


def _sample(row: dict[str, Any], id_bits: int) -> dict[str, Any]:
    """A row of the file, from the Arrow scalars of one of the results."""
    if not row["prompt_ids"].is_valid:
        raise InputError(
            f"row {row['row_index']} has no `prompt_ids`, which a student reads. Run the job with --include-prompt-ids"
        )
    ids, logprobs = (np.concatenate([_values(row[name]) for name in pair]) for pair in (_TOP[:2], _TOP[2:]))
    outputs = _values(row["output_ids"])
    input_ids = np.concatenate([_values(row["prompt_ids"]), outputs])
    return {
        **{name: row[name].as_py() for name in _KEPT},
        "input_ids": input_ids,
        "first": len(input_ids) - len(outputs) - len(_values(row["input_logprobs"])),
        "pairs": pack(ids, logprobs, id_bits),
    }


def load_kd(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read a file of `batchgen export --format kd`, a sample at a time in the order of the results.

    Yields:
        A dict with `id`, `row_index`, `prompt_index` and `sample_index`; `input_ids`, the tokens of prompt and output,
        [T] int64; `first`, the place of the first token with teacher values; and, for the tokens from there on, the
        likeliest K tokens in that token's place: `top_ids` [T - first, K] int64 and `top_logprobs` [T - first, K]
        float32, natural logarithms.

    Raises:
        InputError: the file cannot be read, is damaged, or is another one.
    """
    file = Path(path)
    with read_errors(file), open_parquet(file) as stored:
        if _KEY not in stored.about:
            raise InputError(f"{file} is not a file of `batchgen export --format kd`.")
        id_bits = read_json(stored.about[_KEY])["id_bits"]
        for row in (row for table in stored.groups() for row in table.to_batches(1)):
            sample = {name: row[name][0].as_py() for name in (*_KEPT, "first")}
            input_ids = row["input_ids"][0].values.to_numpy().astype(np.int64)
            pairs = row["pairs"][0].values.to_numpy().reshape(len(input_ids) - sample["first"], -1)
            top_ids, top_logprobs = unpack(pairs, id_bits)
            yield {**sample, "input_ids": input_ids, "top_ids": top_ids, "top_logprobs": top_logprobs}
