"""`batchgen run` on rows of `input_embeds`: JSONL, Parquet, files under --media-root; resumed and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run
from tests.models.adapters import base_model

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def table(model: Path) -> np.ndarray:
    """[V, H] float32: the model's input embeddings."""
    found: np.ndarray = base_model(model).get_input_embeddings().weight.detach().numpy()
    return found


def ids(i: int) -> list[int]:
    return [20 + (7 * i + j) % 100 for j in range(3 + i % 9)]


def outputs(file: Path) -> dict[str, list[int]]:
    return {row["id"]: row["output_ids"] for row in rows_of(file)}


@pytest.fixture
def command(model: Path) -> list[Any]:
    return ["--model", model, "--dtype", "float32", "--include-prompt", "--include-prompt-ids"]


@pytest.mark.field("input_embeds")
def test_all_sources_of_embeddings_give_the_same_tokens(command: list[Any], table: np.ndarray, tmp_path: Path) -> None:
    """Token ids, lists in JSONL and in Parquet, and tensors of a file."""
    count = 12
    write_lines(tmp_path / "ids.jsonl", [{"id": str(i), "input_ids": ids(i), **GREEDY} for i in range(count)])
    run(["run", "ids.jsonl", *command], tmp_path)
    expected = outputs(tmp_path / "ids.out.parquet")
    values = [table[ids(i)] for i in range(count)]
    given = [{"id": str(i), "input_embeds": v.tolist(), **GREEDY} for i, v in enumerate(values)]
    write_lines(tmp_path / "lists.jsonl", given)
    columns = {"id": [str(i) for i in range(count)], "input_embeds": [v.tolist() for v in values]}
    columns["sampling_params"] = [GREEDY] * count
    pq.write_table(pa.table(columns), tmp_path / "columns.parquet")
    (tmp_path / "root").mkdir()
    save_file({f"t{i}": v for i, v in enumerate(values)}, tmp_path / "root" / "all.safetensors")
    named = [{"id": str(i), "input_embeds": f"all.safetensors:t{i}", **GREEDY} for i in range(count)]
    write_lines(tmp_path / "named.jsonl", named)
    for name in ("lists.jsonl", "columns.parquet", "named.jsonl"):
        run(["run", name, "-o", "out.parquet", *command, "--media-root", "root", "--overwrite"], tmp_path)
        assert outputs(tmp_path / "out.parquet") == expected, name
        rows = rows_of(tmp_path / "out.parquet")
        assert {(row["prompt"], row["prompt_ids"]) for row in rows} == {(None, None)}
        assert [row["prompt_tokens"] for row in rows] == [len(ids(i)) for i in range(count)]


@pytest.mark.field("input_embeds")
def test_rows_read_only_files_under_the_media_root(command: list[Any], table: np.ndarray, tmp_path: Path) -> None:
    """tests/engine/test_embeds.py has every name that is refused."""
    (tmp_path / "root").mkdir()
    for folder in (tmp_path / "root", tmp_path):
        save_file({"t": table[ids(0)]}, folder / "t.safetensors")
    names = ["t.safetensors", "../t.safetensors"]
    write_lines(tmp_path / "in.jsonl", [{"input_embeds": name, "max_new_tokens": 1} for name in names])
    run(["run", "in.jsonl", "-o", "out.parquet", *command, "--media-root", "root"], tmp_path)
    inside, outside = (row["error"] for row in rows_of(tmp_path / "out.parquet"))
    assert (inside, outside["code"], outside["param"]) == (None, "media_error", "input_embeds")
    checked = json.loads(run(["check", "in.jsonl", *command, "--json", "--max-errors", "100%"], tmp_path).stdout)
    assert checked["errors"] == {"media_error": 2}
    run(["run", "in.jsonl", "-o", "no.parquet", *command, "--media-root", "none"], tmp_path, expect=2)
