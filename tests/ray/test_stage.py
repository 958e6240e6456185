"""`BatchgenStage` as a function of Arrow tables, without Ray: what it adds, keeps and refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import UsageError
from batchgen.ray import BatchgenStage
from tests.e2e.model import save_model
from tests.e2e.runner import run
from tests.tables.arrow_types import CASES, column

OPTIONS = {"dtype": "float32", "deterministic": True, "max_new_tokens": 4, "cpu_threads": 1}
FLAGS = ["--dtype", "float32", "--deterministic", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stage(model: Path) -> BatchgenStage:
    return BatchgenStage(str(model), **OPTIONS)


ROWS: list[dict[str, Any]] = [
    {"id": "plain", "question": "Hello there"},
    {"id": "two", "question": "Hello", "n": 2, "temperature": 0.9},
    {"id": "wrong", "question": "Hello", "top_p": 1.5},
    {"id": "none"},
    {"id": "chat", "question": '[{"role": "user", "content": "Hi"}]', "max_tokens": 3},
    {"id": "params", "question": "Sorting", "sampling_params": {"temperature": 0.0, "stop": ["a", "e"]}},
]


def rows(given: list[dict[str, Any]] = ROWS) -> pa.Table:
    names = dict.fromkeys(name for row in given for name in row)
    return pa.Table.from_pylist([{name: row.get(name) for name in names} for row in given])


@pytest.mark.parametrize("options", [{"prompt_column": "question"}, {"prompt_template": "Q: {{ question }}\nA:"}])
def test_results_are_those_of_a_run(model: Path, tmp_path: Path, options: dict[str, str]) -> None:
    columns = ["id", "prompt_index", "sample_index", "status", "text", "output_ids", "seed", "finish_reason", "prompt"]
    given = rows().rename_columns({"id": "rid"})
    made = BatchgenStage(str(model), columns=columns, prefix="", **OPTIONS, **options)(given)
    pq.write_table(given, tmp_path / "in.parquet")
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    run(["run", "in.parquet", "-o", "out.parquet", "--model", model, *FLAGS, *flags, "--include-prompt"], tmp_path)
    one = pq.read_table(tmp_path / "out.parquet")
    assert made.select(columns).combine_chunks().equals(one.select(columns).combine_chunks())
    assert made["rid"].to_pylist() == one["id"].to_pylist()


def test_errors_are_values_of_a_column(stage: BatchgenStage) -> None:
    made = stage(rows().rename_columns({"question": "text"}))
    codes = [None if error is None else error["code"] for error in made["generated_error"].to_pylist()]
    assert codes == [None, None, None, "invalid_field", "missing_prompt", "invalid_field", None]
    only = stage(pa.table({"text": pa.array([None, None], pa.string())}))
    assert [error["code"] for error in only["generated_error"].to_pylist()] == ["missing_prompt"] * 2


def test_columns_of_every_type_stay_as_they_are(stage: BatchgenStage) -> None:
    """Also where rows are repeated."""
    names = [name for name, (array, _) in CASES.items() if not isinstance(array, pa.RunEndEncodedArray)]
    large = pa.array([None, 2**60 + 1, 2**60 + 3], pa.int64())
    for samples in ([1, 1, 1], [1, 3, 2]):
        own = {"text": pa.array(["Hello"] * 3), "n": pa.array(samples), "large": large}
        given = pa.table({**own, **{f"{name} column": column(name, 3)[0] for name in names}})
        made = stage(given)
        kept = [i for i, count in enumerate(samples) for _ in range(count)]
        for name in given.column_names:
            assert made.schema.field(name).equals(given.schema.field(name))
            values = given[name].to_pylist()
            assert made[name].to_pylist() == [values[i] for i in kept], name


def test_results_do_not_depend_on_the_batches(stage: BatchgenStage) -> None:
    given = rows([{"id": f"id {i}", "text": f"Hello {i % 5}", "temperature": 0.8, "n": 1 + i % 3} for i in range(23)])
    whole = stage(given)
    for size in (1, 7):
        parts = [stage(given.slice(start, size)) for start in range(0, 23, size)]
        assert pa.concat_tables(parts).combine_chunks().equals(whole.combine_chunks())
    assert stage(given.slice(0, 0)).schema.equals(whole.schema)


def test_what_is_wrong_is_said_with_its_remedy(stage: BatchgenStage, model: Path) -> None:
    for batch in ({"text": ["Hello"]}, pa.RecordBatch.from_pylist([{"text": "Hello"}])):
        with pytest.raises(UsageError, match='batch_format="pyarrow"'):
            stage(batch)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`generated_text` would be added"):
        stage(pa.table({"text": ["Hello"], "generated_text": ["x"]}))
    with pytest.raises(UsageError, match="two columns of the batch are named 'text'"):
        stage(pa.table([["Hello"], ["Hello"]], ["text", "text"]))
    for options, message in (
        ({"columns": ["text", "row_index"]}, "'row_index' cannot be added"),
        ({"max_tokns": 4}, "`max_tokns` is not an argument of BatchgenStage"),
        ({"replicas": 2}, "`replicas` is not an argument of BatchgenStage"),
        ({"top_p": 1.5}, "`top_p` must be"),
        ({"prompt_column": "a", "prompt_template": "{{ b }}"}, "leave one out"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            BatchgenStage(str(model), **options)  # type: ignore[arg-type]
        assert "--" not in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(UsageError, match="no column 'question'"):
        BatchgenStage(str(model), prompt_column="question", **OPTIONS)(pa.table({"text": ["Hello"]}))


def test_a_batch_that_is_given_again_is_not_computed_again(model: Path, tmp_path: Path) -> None:
    given = rows([{"id": f"id {i}", "text": f"Hello {i}", "temperature": 0.8} for i in range(5)])
    stage = BatchgenStage(str(model), work_dir=tmp_path / "work", **OPTIONS)
    first = stage(given)
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
    assert len(files) == 1
    again = BatchgenStage(str(model), work_dir=tmp_path / "work", **OPTIONS)(given)
    assert again.equals(first)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()} == files
    stage(given.slice(0, 3))
    BatchgenStage(str(model), work_dir=tmp_path / "work", temperature=0.5, **OPTIONS)(given)
    assert len(list((tmp_path / "work").iterdir())) == 3


def test_equal_batches_at_the_same_time(model: Path, tmp_path: Path) -> None:
    given = rows([{"id": f"id {i}", "text": f"Hello {i}", "max_new_tokens": 60} for i in range(40)])
    stages = [BatchgenStage(str(model), work_dir=tmp_path / "new" / "work", **OPTIONS) for _ in range(2)]
    made: list[pa.Table] = []
    threads = [Thread(target=lambda stage=stage: made.append(stage(given))) for stage in stages]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0].equals(made[1])


def test_the_process_that_plans_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, batchgen.ray as b; b.BatchgenStage; print(sorted({'torch', 'ray', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
