"""Row groups that are encoded apart and joined, against Arrow's writer of one file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.joined_groups import MAGIC, encode_group, joined_footer, metadata_at

KEYS = {b"batchgen.nulls": b"{}"}
CHOICES = ("a", "bc", None)


def table(rows: int, columns: int, rng: np.random.Generator) -> pa.Table:
    """Lists of floats, strings with nulls, booleans, and further columns of integers."""
    lists = [rng.standard_normal(rng.integers(0, 300)).astype(np.float32) for _ in range(rows)]
    texts = [CHOICES[i] for i in rng.integers(0, len(CHOICES), rows)]
    flags = pa.array(rng.integers(0, 2, rows).astype(bool))
    arrays = {"values": pa.array(lists, pa.list_(pa.float32())), "text": pa.array(texts, pa.string()), "flag": flags}
    arrays |= {f"n{i}": pa.array(rng.integers(0, 1 << 40, rows), pa.int64()) for i in range(columns)}
    return pa.table(arrays)


@pytest.mark.parametrize(("groups", "columns"), [(0, 1), (1, 0), (3, 2), (20, 20)])
@pytest.mark.parametrize("index", [False, True], ids=["", "page index"])
def test_a_joined_file_is_the_one_that_arrow_writes(groups: int, columns: int, index: bool) -> None:
    rng = np.random.default_rng(groups)
    tables = [table(int(rng.integers(1, 50)), columns, rng) for _ in range(max(1, groups))][:groups]
    schema = table(1, columns, rng).schema.with_metadata({"about": "a job"})
    options: dict[str, Any] = {"use_dictionary": ["text"], "write_statistics": ["text", "flag"]}
    options["write_page_index"] = index
    whole = io.BytesIO()
    with pq.ParquetWriter(whole, schema, compression="zstd", write_page_checksum=True, **options) as writer:
        for each in tables:
            writer.write_table(each.cast(schema))
        writer.add_key_value_metadata(KEYS)
    joined, metadata = io.BytesIO(MAGIC), []
    joined.seek(len(MAGIC))
    for each in tables:
        group = encode_group(each, **options)
        metadata.append(metadata_at(group, joined.tell()))
        joined.write(group.data)
    joined.write(joined_footer(schema, KEYS, metadata))
    read = pq.ParquetFile(joined)
    assert read.read().equals(pq.ParquetFile(whole).read(), check_metadata=True)
    if not index or groups < 2:  # Arrow puts the index of all pages behind the last group
        assert joined.getvalue() == whole.getvalue()
