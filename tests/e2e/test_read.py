"""`batchgen.read`: the rows of an output as completions and as tables."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchgen import Completion, Engine, read
from batchgen.errors import InputError, UsageError
from batchgen.request.completion import Score, StateBlock
from tests.e2e.rows import mixed_lines, write_lines
from tests.e2e.runner import interrupt, run

ROWS: list[Any] = [
    {"id": "lp", "text": "Hello there", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    {"id": "states", "text": "Hello", "return_hidden_states": {"layers": [0, -1], "tokens": "all"}, "n": 2, "seed": 1},
    {"id": "score", "text": "One, two,", "completions": [" three", " four five"]},
    {"id": "<b>", "text": "Hello <i>", "label": [1, {"a": None}], "return_hidden_states": {"tokens": "last"}},
    {"id": "wrong", "text": "a", "top_p": 7},
    {"id": "words", "text": "Hi", "return_logprob": True, "return_text_in_logprobs": True},
]
OPTIONS = ["--dtype", "float32", "--max-new-tokens", "5", "--include-prompt-ids"]


@pytest.fixture(scope="module")
def output(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    write_lines(folder / "in.jsonl", ROWS)
    run(["run", "in.jsonl", "-o", "out.parquet", "--model", model, *OPTIONS, "--include-prompt"], folder)
    run(["run", "in.jsonl", "-o", "shards", "--model", model, *OPTIONS, "--shard", "0/2"], folder)
    run(["run", "in.jsonl", "-o", "shards", "--model", model, *OPTIONS, "--shard", "1/2"], folder)
    return folder / "out.parquet"


def same(found: Any, expected: Any) -> bool:
    """Whether two values of an attribute are equal but for rounding, lists and arrays with their nulls."""
    if found is None or expected is None:
        return found is expected
    if isinstance(expected, list | tuple) and expected and isinstance(expected[0], Score):
        names = [each.name for each in fields(Score)]
        return all(np.allclose(found[name], [getattr(each, name) for each in expected], atol=1e-4) for name in names)
    if isinstance(expected, list | tuple) and expected and isinstance(expected[0], StateBlock):
        assert [(b.layer, b.span, b.token_start, b.dtype) for b in sorted(found, key=lambda b: b.layer)] == [
            (b.layer, b.span, b.token_start, b.dtype) for b in sorted(expected, key=lambda b: b.layer)
        ]
        by_layer = {block.layer: block.values for block in found}
        return all(np.allclose(by_layer[block.layer], block.values, atol=1e-3) for block in expected)
    if isinstance(expected, np.ndarray | list | tuple) and not isinstance(expected[0], str):
        assert isinstance(found, np.ndarray)
        masks = [np.ma.getmaskarray(np.ma.asarray(value)).tolist() for value in (found, expected)]
        return masks[0] == masks[1] and np.allclose(np.ma.filled(found, 0), np.ma.filled(expected, 0), atol=1e-3)
    return bool(np.allclose(found, expected, atol=1e-3)) if isinstance(expected, float) else bool(found == expected)


def test_rows_are_the_completions_of_the_engine(engine: Engine, output: Path) -> None:
    rows = list(read(output))
    limited = [row if "completions" in row else {"max_new_tokens": 5, **row} for row in ROWS]
    completions = list(engine.generate(limited, ordered=True))
    assert [row.key for row in rows] == [completion.key for completion in completions]
    for row, completion in zip(rows, completions, strict=True):
        assert isinstance(row, Completion)
        if completion.error is not None:
            assert row.error is not None
            assert (row.status, row.error.code, row.error.param) == ("error", "invalid_field", "top_p")
            continue
        for each in fields(Completion):
            if each.name not in ("cached_tokens", "dedup_of", "error"):
                values = getattr(row, each.name), getattr(completion, each.name)
                assert same(*values), (row.id, each.name, *values)
    assert rows[4].extra == {"label": [1, {"a": None}]}
    assert rows[4].prompt == "<s>Hello <i>"


def test_tables(output: Path) -> None:
    results, stored = read(output), pq.read_table(output)
    assert results.complete
    assert results.footer["rows"] == 7
    assert results.to_arrow().equals(stored.replace_schema_metadata(None))
    assert results.to_arrow(["id", "text"]).column_names == ["id", "text"]
    assert results.to_polars(["id", "text"])["text"].to_list() == stored["text"].to_pylist()
    frame = results.to_pandas()
    assert [text if isinstance(text, str) else None for text in frame["text"]] == stored["text"].to_pylist()
    assert isinstance(frame["output_logprobs"][0], np.ndarray)
    scored = frame[frame["id"] == "score"].iloc[0]["scores"]
    assert np.allclose(scored["sum"], scored["mean"] * scored["tokens"])
    with pytest.raises(UsageError, match="has no column `nothing`; it has id, row_index"):
        results.to_arrow(["nothing"])


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_library_is_named(output: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"{name} is not installed: `pip install {name}`, or use `to_arrow`"):
        getattr(read(output), f"to_{name}")()


def test_shards_have_their_hidden_states(output: Path) -> None:
    shards = read(output.parent / "shards")
    assert len(shards) == len(read(output))
    states = {row.key: [(b.layer, b.values.shape) for b in row.states or ()] for row in shards}
    assert states == {row.key: [(b.layer, b.values.shape) for b in row.states or ()] for row in read(output)}
    assert sum(map(len, states.values())) == 5


def test_a_job_that_is_not_finished(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(200, seed=3))
    interrupt(["run", "in.jsonl", "-o", "out.parquet", "--model", model, "--commit-every", "4"], tmp_path)
    results = read(tmp_path / "out.parquet")
    assert not results.complete
    assert repr(results).endswith(" rows, not finished)")
    assert 0 < len(list(results)) == len(results) == len(results.to_arrow())
    with pytest.raises(InputError, match="is not finished"):
        read(tmp_path / "out.parquet", finished=True)
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "none.parquet")


def test_a_notebook_shows_escaped_rows(output: Path) -> None:
    results = read(output)
    assert repr(results) == f"ResultTable({str(output)!r}, 7 rows)"
    html = results._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "7 of 7 rows" in html
    row = next(row for row in results if row.id == "<b>")
    assert "&lt;b&gt;" in row._repr_html_()
    assert "<b>" not in row._repr_html_()
    assert repr(row).startswith("ResultRow(row_index=3, id='<b>', finish_reason=")
