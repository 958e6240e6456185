"""A job in a real notebook: the kernel of Jupyter runs its cells, with progress, tables and an interrupt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
CELLS = {
    "engine": "from batchgen import Engine, read\nengine = Engine()\nengine",
    "generate": "done = list(engine.generate([{'text': '<b>Hi', 'max_new_tokens': 4, 'seed': i} for i in range(9)]))",
    "completion": "done[0]",
    "quiet": "list(engine.generate(['Hi'], progress=False))",
    "table": "import sys\n!{sys.executable} -m batchgen run rows.jsonl -o out.parquet 2>/dev/null\nread('out.parquet')",
    "advice": "_ = list(engine.generate(['Hi'] * 3))",
    "wrong": "Engine(tensor_parallel_size=2)",
    "interrupt": (
        "import os, signal, threading\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "rows = [{'text': f'Hi {i}', 'max_new_tokens': 200, 'ignore_eos': True} for i in range(20000)]\n"
        "_ = list(engine.generate(rows))"
    ),
    "after": "len(list(engine.generate(['again'])))",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "rows.jsonl").write_text('{"id": "<i>", "text": "<b>Hi"}\n')
    tagged = [nbformat.v4.new_code_cell(text, metadata={"tags": ["raises-exception"]}) for text in CELLS.values()]
    book = nbformat.v4.new_notebook(cells=tagged)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)
    return {name: cell["outputs"] for name, cell in zip(CELLS, book["cells"], strict=True)}


def text_of(outputs: list[Any]) -> str:
    return "".join(each.get("text", "") + "\n".join(each.get("traceback", ())) for each in outputs)


def test_objects_are_shown_in_one_line(outputs: dict[str, list[Any]]) -> None:
    assert outputs["engine"][-1]["data"]["text/plain"].startswith("Engine('demo', llama, ")
    html = outputs["completion"][-1]["data"]["text/html"]
    assert html.startswith("<table>")
    assert outputs["completion"][-1]["data"]["text/plain"].startswith("Completion(row_index=")


def test_progress_is_shown_in_the_cell(outputs: dict[str, list[Any]]) -> None:
    shown = text_of(outputs["generate"])
    assert "generating: 100%" in shown
    assert "9/9" in shown
    assert text_of(outputs["quiet"]) == ""


def test_an_output_is_an_escaped_table(outputs: dict[str, list[Any]]) -> None:
    html = outputs["table"][-1]["data"]["text/html"]
    assert "1 of 1 rows" in html
    assert "&lt;i&gt;" in html
    assert "<i>" not in html


def test_advice_and_errors_are_short(outputs: dict[str, list[Any]]) -> None:
    assert "AdviceWarning: all 3 prompts are equal" in text_of(outputs["advice"])
    assert outputs["wrong"][-1]["ename"] == "UnknownArgument"
    assert outputs["wrong"][-1]["evalue"].endswith("a model runs on one device, whole; leave it out")


def test_an_interrupted_cell_leaves_the_engine_usable(outputs: dict[str, list[Any]]) -> None:
    assert outputs["interrupt"][-1]["ename"] == "KeyboardInterrupt"
    assert outputs["after"][-1]["data"]["text/plain"] == "1"
