"""`--carry COL,...`: carried fields as typed columns of the output."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.results_file import read_footer
from batchgen.data.schema import SCHEMA
from tests.e2e.rows import prompts, read, write_lines
from tests.e2e.runner import interrupt, parts_of, run

F32 = ["--dtype", "float32", "--max-new-tokens", "4"]
COUNT = 40
NAMES = ["fox", "dog", "crow", "the quick ", "lazy "]
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, 0, 1, 250, tzinfo=datetime.UTC)
KEPT: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, None, False]),
    "small": (pa.int8(), [-128, 127, None]),
    "big": (pa.uint64(), [2**64 - 1, 0, None]),
    "share": (pa.float32(), [0.25, None, -1e10]),
    "exact": (pa.float64(), [0.1, 1.0, None]),
    "name": (pa.string(), ["ż", "", None]),
    "day": (pa.date32(), [DAY, None, DAY]),
    "moment": (pa.timestamp("us", "UTC"), [NOON, None, NOON]),
    "vector": (pa.list_(pa.float32()), [[0.5, 1.0], [], None]),
    "tags": (pa.list_(pa.string()), [["a", "b"], None, []]),
}
"""Parquet columns that keep their type and values."""
AS_STRINGS: dict[str, tuple[pa.Array, list[str | None]]] = {
    "where": (pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int32())])), ['{"x":1}', None, "{}"]),
    "kind": (pa.array(["a", "b", None]).dictionary_encode(), ["a", "b", None]),
    "large": (pa.array(["a", "b", None], pa.large_string()), ["a", "b", None]),
    "bytes": (pa.array([b"text", None, b"\xff"]), ["text", None, "/w=="]),
}
"""Parquet columns that become strings."""


def cycled(values: list[Any]) -> list[Any]:
    return [values[i % 3] for i in range(COUNT)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns: dict[str, Any] = {"text": pa.array(prompts(COUNT, 1)), "n": pa.array([1 + i % 2 for i in range(COUNT)])}
    columns |= {name: pa.array(cycled(values), kind) for name, (kind, values) in KEPT.items()}
    columns |= {name: array.take(pa.array([i % 3 for i in range(COUNT)])) for name, (array, _) in AS_STRINGS.items()}
    path = tmp_path_factory.mktemp("carry") / "in.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def check(table: pa.Table, names: list[str]) -> None:
    """Assert that every sample of a row has the row's values, in columns of the documented types."""
    assert table.schema.names == [*SCHEMA.names, *names]
    rows = table["row_index"].to_pylist()
    assert set(rows) == set(range(COUNT))
    for name in names:
        kind, values = KEPT[name] if name in KEPT else (pa.string(), AS_STRINGS[name][1])
        assert table.schema.field(name).type == kind, name
        assert table[name].to_pylist() == [values[row % 3] for row in rows], name
    assert table["extra"].null_count == len(rows)


def test_parquet_columns_keep_their_types(model: Path, source: Path, tmp_path: Path) -> None:
    names = [*KEPT, *AS_STRINGS]
    command = ["run", source, "--model", model, *F32, "--carry", ",".join(names)]
    run([*command, "-o", "out.parquet"], tmp_path)
    check(read(tmp_path / "out.parquet"), names)
    for shard in range(2):
        run([*command, "-o", "shards", "--shard", f"{shard}/2", "--commit-every", "2"], tmp_path)
    run(["merge", "shards", "-o", "merged.parquet"], tmp_path)
    check(read(tmp_path / "merged.parquet"), names)
    exported = run(["export", "out.parquet", "--format", "jsonl", "-o", "out.jsonl"], tmp_path, expect=None)
    assert exported.code == 0, exported.stderr


def test_rows_that_are_reused_carry_what_the_new_command_names(model: Path, source: Path, tmp_path: Path) -> None:
    command = ["run", source, "--model", model, "--dtype", "float32", "-o", "out.parquet", "--max-new-tokens", "60"]
    interrupt([*command, "--carry", "small"], tmp_path)
    assert pq.read_schema(parts_of(tmp_path / "out.parquet")[0]).names == [*SCHEMA.names, "small"]
    assert "--carry" in run([*command, "--carry", "moment"], tmp_path, expect=2).stderr
    report = run([*command, "--carry", "small,name", "--resume-anyway", "--report", "-"], tmp_path).report
    assert report["rows_resumed"] > 0
    table = read(tmp_path / "out.parquet")
    for name in ("small", "name"):
        assert table[name].to_pylist() == [KEPT[name][1][row % 3] for row in table["row_index"].to_pylist()]


def test_fields_of_lines_are_strings(model: Path, tmp_path: Path) -> None:
    values = ["de", 3, 1.5, True, None, {"a": [1, None]}, [], "3"]
    rows: list[dict[str, Any]] = [{"text": "x", "note": value, "other": 1} for value in values]
    rows += [{"text": "x"}, {"text": "x", "temperature": "hot", "note": "of a bad row"}]
    run(["run", write_lines(tmp_path / "in.jsonl", rows), "--model", model, *F32, "--carry", "note,absent"], tmp_path)
    table = read(tmp_path / "in.out.parquet")
    assert table.schema.field("note").type == table.schema.field("absent").type == pa.string()
    spelled = ["de", "3", "1.5", "true", None, '{"a":[1,null]}', "[]", "3", None, "of a bad row"]
    assert table["note"].to_pylist() == spelled
    assert table["absent"].null_count == len(table)


def test_refused_rows_carry_what_can_be_read_as_the_type_of_the_column(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "k=2"
    folder.mkdir(parents=True)
    columns = {"id": ["a", "b", "c", "d"], "text": ["x"] * 4, "k": [None, 1, 2, 2], "score": [5, 6, 7, None]}
    pq.write_table(pa.table({**columns, "source_line": [None, None, None, "mine"]}), folder / "in.parquet")
    run(
        ["run", "data", "--model", model, "--carry", "k,score", "--include-source", *F32, "-o", "out.parquet"], tmp_path
    )
    names = ["id", "status", "k", "score", "source_line"]
    assert [tuple(row.values()) for row in read(tmp_path / "out.parquet").select(names).to_pylist()] == [
        ("a", "ok", "2", 5, 1),
        ("b", "error", "1", 6, 2),
        ("c", "ok", "2", 7, 3),
        ("d", "error", "2", None, 4),
    ]


def test_an_empty_input_has_the_columns(model: Path, source: Path, tmp_path: Path) -> None:
    command = ["run", source, "--model", model, "-o", "out.parquet", "--limit", "0", "--carry", "moment,vector"]
    run(command, tmp_path)
    table = read(tmp_path / "out.parquet")
    assert len(table) == 0
    assert table.schema.field("moment").type == pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("carry", "more", "problem"),
    [
        ("text", [], "the output has a column of that name"),
        ("small,row_index", [], "the output has a column of that name"),
        ("n", [], "the row uses that field"),
        ("small,smal", [], "the input has no such column; it has text"),
        ("name", ["--prompt-column", "name"], "the row uses that field"),
    ],
)
def test_names_that_cannot_be_carried_are_refused(
    model: Path, source: Path, tmp_path: Path, carry: str, more: list[str], problem: str
) -> None:
    for name in ("run", "check"):
        words = [name, source, "--model", model, "-o", "out.parquet", "--carry", carry, *more]
        assert problem in run(words, tmp_path, expect=2).stderr
    assert not (tmp_path / "out.parquet").exists()


def test_the_size_estimate_includes_copied_input(model: Path, tmp_path: Path) -> None:
    """--max-output-bytes refuses a job before it runs; a prompt's other samples and scored texts add little."""
    rng = Random(3)

    def row(**more: Any) -> dict[str, Any]:
        note = " ".join(f"{rng.choice(NAMES)}{rng.randint(0, 10**6)}" for _ in range(100))
        return {"input_ids": rng.choices(range(5, 90), k=60), "note": note, **more}

    rows = [row(n=3, max_new_tokens=1) for _ in range(40)] + [row(completions=["a", "b c"]) for _ in range(40)]
    source = write_lines(tmp_path / "in.jsonl", [*rows, *(row(top_p=9) for _ in range(20))])

    def sizes(*options: str) -> tuple[int, int]:
        job = [source, "--model", model, "--dtype", "float32", *options]
        about = json.loads(run(["check", *job, "--json"], tmp_path).stdout)["estimated_output_bytes"]
        run(["run", *job, "-o", "out.parquet", "--overwrite", "--max-output-bytes", str(2 * about)], tmp_path)
        timeline = (read_footer(tmp_path / "out.parquet") or {}).get("timeline")  # is as long as the run was
        return about, (tmp_path / "out.parquet").stat().st_size - len(json.dumps(timeline))

    least = sizes("--carry", "none")
    limited = ["run", source, "--model", model, "--dtype", "float32", "--carry", "none", "--max-output-bytes"]
    refused = run([*limited, least[0] - 1], tmp_path, expect=2)
    assert "or write less of the input (--carry, --include-prompt, --include-prompt-ids)." in refused.stderr
    for more in ([], ["--include-prompt"], ["--include-prompt-ids"], ["--echo"]):
        options = ["--carry", "none", *more] if more else []
        about, size = (all_of - less for all_of, less in zip(sizes(*options), least, strict=True))
        assert 0.6 < about / size < 2.5, (options, about, size)  # ids below 90 take a byte
