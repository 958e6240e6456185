"""A report's page in headless Chromium: what a reader clicks, both colour schemes, a phone, 100,000 rows.

With SCREENSHOTS=FOLDER, pictures of the page are written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.schema import SCHEMA, with_footer
from tests.e2e.browser import CHROMIUM, Page, browser
from tests.e2e.report_rows import data_of, write_rows
from tests.e2e.runner import run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")]
ENTRIES = "document.querySelectorAll('#rows details').length"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_rows(folder / "in.jsonl", copies=8)
    run(["run", "in.jsonl", "-o", "out.parquet", "--max-errors", "100"], folder)
    run(["report", "out.parquet"], folder)
    return folder / "out.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def save(page: Page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll('{selector}')].map((each) => each.textContent)")
    return found


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_at_any_width_in_both_schemes(page: Page, html: Path, width: int, *, dark: bool) -> None:
    page.requests.clear()
    page.problems.clear()
    page.open(html, width, dark=dark)
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.wait_for("document.querySelectorAll('.block').length > 50")
    name = f"{'dark' if dark else 'light'}-{width}"
    save(page, name)
    assert page.run("document.documentElement.scrollWidth") <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith("data:image/jpeg;base64,")] == [html.as_uri()]
    assert page.run("document.querySelectorAll('img[src=x], script').length") == 3


def test_the_charts_follow_the_colour_scheme(page: Page, html: Path) -> None:
    pixels = "[...document.querySelectorAll('canvas')].map((each) => each.toDataURL()).join()"
    page.open(html, 1200, dark=False)
    light = page.run(pixels)
    page.scheme(dark=True)
    page.wait_for(f"document.querySelectorAll('canvas').length > 3 && {pixels} !== {light!r}")


def test_search_filters_and_order(page: Page, html: Path) -> None:
    page.open(html, 1200, dark=False)
    data = data_of(html)
    assert page.run(ENTRIES) == 50 < len(data["rows"])
    page.click("#more")
    page.wait_for(f"{ENTRIES} === 100")
    page.click("#search")
    page.type("#search", "NUMBER:")
    page.wait_for(f"{ENTRIES} === {sum('number:' in json.dumps(row).lower() for row in data['rows'])}")
    page.choose("#tag", "error")
    assert page.run(ENTRIES) == 0
    page.type("#search", "bad-3")
    page.wait_for(f"{ENTRIES} === 1")
    page.type("#search", "onerror=alert")
    page.wait_for(f"{ENTRIES} === 1")
    page.run("document.querySelector('#search').value = ''")
    for tag in ("constraint failed", "tool calls", "pictures", "logprobs", "stop"):
        page.choose("#tag", tag)
        wanted = sum(tag in row["tags"] for row in data["rows"])
        assert page.run("document.querySelector('#count').textContent").startswith(f"{wanted} of the "), tag
        assert page.run(ENTRIES) == min(50, wanted) > 0, tag
    page.choose("#tag", "")
    page.choose("#order", "longest answer first")
    first = page.run("document.querySelector('#rows summary small').textContent")
    assert int(first.split(".")[0]) == max(data["rows"], key=lambda row: row["length"][2])["row"][0]


def test_a_row_opens(page: Page, html: Path) -> None:
    page.open(html, 1200, dark=False)
    page.choose("#tag", "logprobs")
    page.click("#rows summary")
    page.wait_for("document.querySelectorAll('#rows .block').length >= 2")
    (row,) = [row for row in data_of(html)["rows"] if row["id"] == "lp-0"]
    assert texts(page, "#rows details:first-child .block pre") == ["The capital 0 is é", row["text"]]
    page.click("#coloured")
    page.click("#rows summary")
    page.wait_for("document.querySelectorAll('#rows .answer span').length > 5")
    tokens = row["tokens"]
    assert texts(page, "#rows details:first-child .answer span") == [text for text, _ in tokens]
    titles = page.run("[...document.querySelectorAll('#rows details:first-child .answer span')].map((e) => e.title)")
    assert [float(title.split()[1].rstrip(",")) for title in titles] == [logprob for _, logprob in tokens]
    assert len(set(page.run("[...document.querySelectorAll('#rows .answer span')].map((e) => e.className)"))) > 1
    page.click("#coloured")
    page.choose("#tag", "pictures")
    page.click("#rows summary")
    page.wait_for("document.querySelector('#rows img')?.naturalWidth > 8")
    page.choose("#tag", "tool calls")
    page.click("#rows summary")
    page.wait_for("[...document.querySelectorAll('#rows .answer pre')].some((e) => e.textContent.startsWith('add(a='))")


def test_errors_charts_and_slow_rows_lead_to_their_rows(page: Page, html: Path) -> None:
    page.open(html, 1200, dark=False)
    page.click("#errors .link")
    page.wait_for("document.querySelector('#tag').value === 'invalid_field'")
    assert page.run(ENTRIES) == 9
    assert all("must be" in text for text in texts(page, "#rows summary .text"))
    row = page.run("document.querySelector('#slow .link').textContent").removeprefix("row ")
    page.click("#slow .link")
    page.wait_for(f"document.querySelector('#rows summary small').textContent.split('.')[0] === '{row}'")
    page.run("document.querySelectorAll('figure')[5].scrollIntoView()")
    x, y = page.run(
        "(() => { const box = document.querySelectorAll('figure canvas')[5].getBoundingClientRect();"
        "return [box.x + 0.3 * box.width, box.y + 12]; })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    page.wait_for("['stop', 'length'].includes(document.querySelector('#tag').value)")


def test_thoughts_are_shown_apart(page: Page, tmp_path: Path) -> None:
    columns: dict[str, Any] = {name: [None] for name in SCHEMA.names}
    columns |= {"id": ["t"], "row_index": [0], "prompt_index": [0], "sample_index": [0], "status": ["ok"]}
    columns |= {"finish_reason": ["stop"], "text": ["42"], "reasoning": ["17 and 25"], "prompt": ["17 + 25?"]}
    table = pa.table(columns, schema=SCHEMA)
    pq.write_table(table.cast(with_footer({"fingerprint": "f", "inputs": []})), tmp_path / "out.parquet")
    run(["report", "out.parquet"], tmp_path)
    page.open(tmp_path / "out.html", 400, dark=True)
    page.click("#rows summary")
    page.wait_for("document.querySelector('#rows .thoughts pre')")
    assert texts(page, "#rows .block") == ["prompt17 + 25?", "thoughts17 and 25", "answer42"]


def test_100_000_rows_stay_responsive(page: Page, tmp_path: Path) -> None:
    count, rng = 100_000, np.random.default_rng(0)
    made: dict[str, Any] = {
        "id": [f"r{row}" for row in range(count)],
        "row_index": np.arange(count),
        "prompt_index": np.zeros(count, np.int32),
        "sample_index": np.zeros(count, np.int32),
        "status": ["ok"] * count,
        "finish_reason": rng.choice(["stop", "length"], count).tolist(),
        "text": [f"word {row} " * (row % 90) for row in range(count)],
        "prompt_tokens": rng.integers(1, 4000, count).astype(np.int32),
        "completion_tokens": rng.integers(1, 900, count).astype(np.int32),
        "cached_tokens": np.zeros(count, np.int32),
    }
    columns = [pa.array(made[f.name], f.type) if f.name in made else pa.nulls(count, f.type) for f in SCHEMA]
    table = pa.table(columns, schema=with_footer({"fingerprint": "f", "inputs": []}))
    pq.write_table(table, tmp_path / "out.parquet", row_group_size=10_000)
    run(["report", "out.parquet"], tmp_path)
    assert (tmp_path / "out.html").stat().st_size < 5_000_000
    page.open(tmp_path / "out.html", 1200, dark=False)
    save(page, "large")
    assert "a sample of all 100,000" in page.run("document.querySelector('#count').textContent")
    took = page.run(
        "(() => { const began = performance.now(); const field = document.querySelector('#search');"
        "for (const text of ['word', 'word 5', 'nothing', '']) {"
        "field.value = text; field.dispatchEvent(new Event('input')); document.body.offsetHeight; }"
        "return performance.now() - began; })()"
    )
    assert took < 2000
    assert page.run(ENTRIES) == 50
    assert page.problems == []
