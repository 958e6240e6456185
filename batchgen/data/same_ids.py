"""Ids that several shards hold: the run of one shard sees no other's rows, so that only their merging can tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from batchgen.data.files import open_parquet
from batchgen.data.view import Results
from batchgen.errors import UsageError

__all__ = ["refuse_same_ids"]


def refuse_same_ids(files: Sequence[Path]) -> None:
    """Refuse results files in which two input rows of one id have results. In memory: 16 bytes a row, and no text.

    Rows in error do not count: a repeated id within a shard is one, and which of the others had claimed theirs before
    they failed is not known.

    Raises:
        UsageError: two rows have the same id.
        OSError, pa.ArrowException: a file is damaged.
    """
    found = [_hashes(file) for file in files]
    hashes, rows = (np.concatenate(columns) for columns in zip(*found, strict=True))
    ends = np.cumsum([len(its) for its, _ in found])
    order = np.lexsort((rows, hashes))
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    # The first repetition in the input; two ids may have one hash, so they are looked up.
    for at in same[np.argsort(rows[order[same + 1]])]:
        places = order[at : at + 2]
        first, second = ((files[np.searchsorted(ends, place, "right")], int(rows[place])) for place in places)
        if (name := _id(*first)) == _id(*second):
            count = len(np.unique(hashes[order][same]))
            among = f" (one of {count:,} that are repeated)" if count > 1 else ""
            raise UsageError(
                f"id {name!r}{among} is that of row {first[1]} in {first[0]} and of row {second[1]} in {second[0]}. "
                "Make ids unique and run the job again, or join the shards as they are with --allow-duplicate-ids."
            )


def _hashes(file: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each input row with a result: its id's hash and its `row_index`."""
    hashes, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    last = -1
    with open_parquet(file) as parquet:
        for batch in parquet.iter_batches(columns=["id", "row_index", "status"]):
            good = batch.filter(pc.equal(batch["status"], "ok"))
            index = good["row_index"].to_numpy()
            new = np.diff(index, prepend=last) != 0  # a row's prompts and samples follow each other
            ids = good["id"].filter(new).to_pylist()
            hashes.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            rows.append(index[new])
            last = index[-1] if len(index) else last
    return np.concatenate(hashes), np.concatenate(rows)


def _id(file: Path, row: int) -> str:
    return str(next(Results([file], True, None).rows(row=row, columns=["id"]))["id"])
