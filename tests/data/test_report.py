"""A report's figures equal a slow count, its choice of samples depends on them alone, and text in its page is data."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.data.out.report import figures as report_figures
from batchgen.data.out.report.figures import read_figures, rows_at
from batchgen.data.out.report.page import island, page
from batchgen.data.schema import OutputRow, completions_to_table, with_footer
from batchgen.errors import ErrorCode, ErrorInfo
from batchgen.request.completion import Completion

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>]]>&amp;{{data}}\u2028\u2029\0\x1b\ud800 \u202e'\""


def completions(count: int, seed: int) -> list[OutputRow]:
    rng, rows = random.Random(seed), []
    for row in range(count):
        for sample in range(rng.choice((1, 1, 3))):
            lengths = {"prompt_tokens": rng.randrange(300), "completion_tokens": int(rng.expovariate(0.02))}
            done = Completion(row, 0, sample, finish_reason="stop", text="x", cached_tokens=rng.randrange(5), **lengths)
            if rng.random() < 0.05:
                done = Completion(row, error=ErrorInfo(ErrorCode.INVALID_FIELD, "wrong"))
            elif rng.random() < 0.1:
                object.__setattr__(done, "constraint_ok", rng.random() < 0.5)
            rows.append(OutputRow(done, f"r{row}"))
            if done.error is not None:
                break
    return rows


def written(folder: Path, rows: list[OutputRow], cuts: list[int], size: int) -> list[Path]:
    """Files of the rows between these places, in row groups of `size`."""
    paths = [folder / f"{number}-{size}.parquet" for number in range(len(cuts) + 1)]
    for path, start, end in zip(paths, [0, *cuts], [*cuts, len(rows)], strict=True):
        table = completions_to_table(rows[start:end]).cast(with_footer({"fingerprint": "f"}))
        pq.write_table(table, path, row_group_size=size)
    return paths


@pytest.mark.parametrize("seed", range(3))
def test_figures_equal_a_slow_count(seed: int, tmp_path: Path) -> None:
    rows = completions(701, seed)
    figures = read_figures(written(tmp_path, rows, [13, 400], 97), [5, 7])
    done = [row.completion for row in rows]
    good = [each for each in done if each.error is None]
    assert figures.samples == len(rows)
    assert figures.prompt_tokens == sum(each.prompt_tokens or 0 for each in done if not each.sample_index)
    assert figures.distinct_tokens == sum((each.prompt_tokens or 0) - (each.cached_tokens or 0) for each in done)
    for name in ("prompt_tokens", "completion_tokens"):
        lengths, bins = Counter(getattr(each, name) for each in good), figures.histogram(name)
        assert len(bins) <= 40
        for start, end, count in bins:
            assert count == sum(lengths[length] for length in range(start, end))
        assert sum(count for *_, count in bins) == len(good)


def test_the_choice_depends_on_the_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"error": 20, "constraint failed": 10, "slow": 8, "longest": 6, "": 50}
    monkeypatch.setattr(report_figures, "_MOST", limits)
    rows = completions(900, 9)
    slow = [3, 8, 700]
    files = written(tmp_path, rows, [], 1000), written(tmp_path, rows, [1, 2, 500], 33)
    chosen = read_figures(files[0], slow).chosen
    assert chosen == read_figures(files[1], slow).chosen
    assert [*chosen] == [*read_figures(files[1], slow).chosen]
    done = [row.completion for row in rows]
    errors = [place for place, each in enumerate(done) if each.error is not None]
    assert [place for place, reason in chosen.items() if reason == "error"] == errors[:20]
    unmet = {place for place, reason in chosen.items() if reason == "constraint failed"}
    assert len(unmet) == 10
    assert all(done[place].constraint_ok is False for place in unmet)
    assert {place for place, each in enumerate(done) if each.row_index in slow} <= chosen.keys()
    lengths = sorted(each.completion_tokens or 0 for each in done if each.error is None)
    for place, reason in chosen.items():
        assert reason != "longest" or (done[place].completion_tokens or 0) >= lengths[-6]
    assert 50 <= len(chosen) <= sum(limits.values())
    for paths in files:
        found = dict(rows_at(paths, chosen, ("row_index", "sample_index", "text")))
        assert [*found] == sorted(chosen)
        for place, row in found.items():
            assert row == {
                "row_index": done[place].row_index,
                "sample_index": done[place].sample_index,
                "text": row["text"],
            }


class _Scripts(HTMLParser):
    """The scripts of a page, and every tag and attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "title": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem or (self.tags and self.tags[-1] == "title" and data.strip()):
            self.inside[self.tags[-1]][-1] += data


def parsed(text: str) -> _Scripts:
    found = _Scripts()
    found.feed(text)
    return found


def test_hostile_text_stays_data() -> None:
    data: Any = {HOSTILE: [HOSTILE, {"deep": HOSTILE * 3}], "number": 1.5, "none": None}
    empty = parsed(page({}, "t", "window.vegaEmbed = 1;").decode())
    found = parsed(page(data, HOSTILE.replace("\ud800", ""), "window.vegaEmbed = 1;").decode())
    assert found.tags == empty.tags
    assert json.loads(found.inside["script"][0]) == data
    assert found.inside["script"][1:] == empty.inside["script"][1:]
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in found.attributes)
    assert not set("<>&\u2028\u2029") & set(island(data))


def test_the_policy_allows_the_page_s_scripts_and_style_alone() -> None:
    found = parsed(page({}, "t", "'</script><!--'").decode())
    policy = next(value for name, value in found.attributes if name == "content" and value and "default-src" in value)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.inside["script"][1:]]
    (style,) = found.inside["style"]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert rules["style-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    assert rules["img-src"] == "data:"
    assert len(found.inside["script"]) == 3


def test_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        island(float("nan"))
