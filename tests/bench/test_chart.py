"""`batchgen bench --from` and `--chart`: stored figures, the tables in a terminal and the picture."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.bench import show
from batchgen.bench.figures import (
    Figure,
    Measured,
    SkippedPeer,
    Spread,
    StoredFigures,
    ours_over,
    read_figures,
    workload_figures,
)
from batchgen.bench.floors import FloorWork
from batchgen.bench.process import Generated
from batchgen.bench.show import check_chart, draw_stored, print_comparison, print_others, write_chart
from batchgen.cli.app import run_command
from batchgen.errors import OutputError, UsageError
from tests.bench.fakes import console_text, silent_console

RATES = {
    "unique": {"batchgen": 800.0, "peer-one": 640.0, "peer-two": 1600.0},
    "logprobs": {"batchgen": 400.0},
}
"""Workload -> engine -> tokens per second. Their ratios are exact in binary."""


def made() -> list[Figure]:
    about = {"cpu": "A <CPU> & $more$", "commit": "0123456789ab", "repeat": 2, "versions": {"torch": "2"}}
    engine_about = {"version": "1.2", "dtype": "bfloat16", "device": "cpu", "threads": 2, "agreement": 1.0}
    found = []
    for name, rates in RATES.items():
        engines = []
        for engine, rate in rates.items():
            passes = [Generated([[0] * 100], 100 / r, 200 / r) for r in (rate, rate)]
            bare = [Generated([[0] * 100], 50 / rate, 100 / rate)] * 2 if name == "logprobs" else []
            setting = {"batch": 8} if engine == "peer-one" else {}
            engines.append(Measured({"engine": engine, "setting": setting, **engine_about}, passes, bare))
        work = FloorWork(9, 9, 9, 100, 8e8, prompt_flops=4e8, decode_flops=4e8, decode_bytes=1e8, resident_bytes=0)
        here = {"workload": name, "model": "random:toy", "date": "2026-11", **about}
        found += workload_figures(here, engines, work, 8e9, 2e9)
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "figures.jsonl"
    path.write_text("".join(figure.to_json() + "\n" for figure in made()))
    return path


# Stored figures


def test_stored_figures_are_read_back_and_the_last_of_a_key_counts(stored: Path) -> None:
    found = read_figures(stored)
    assert [asdict(figure) for figure in found.figures] == [asdict(figure) for figure in made()]
    assert found.others == []
    first = made()[0]
    with stored.open("a") as stream:
        stream.write("\n" + replace(first, value=7.0).to_json() + "\n")
        stream.write(replace(first, model="random:other").to_json() + "\n")
    again = read_figures(stored).figures
    assert len(again) == len(made()) + 1

    def key(figure: Figure) -> tuple[str, ...]:
        return figure.model, figure.workload, figure.engine, figure.metric

    assert [figure.value for figure in again if key(figure) == key(first)] == [7.0]


def test_figures_of_other_versions_are_read(tmp_path: Path) -> None:
    """An engine that is not compared any more, a key that is not known, and keys that were not written."""
    path = tmp_path / "old.jsonl"
    old = {"workload": "unique", "engine": "ctranslate2", "metric": "output_tokens_per_second", "value": 5, "new": [1]}
    path.write_text(json.dumps(old) + "\n" + json.dumps({"workload": "plan", "seconds": 1.5}) + "\n")
    found = read_figures(path)
    (figure,) = found.figures
    assert (figure.value, figure.min, figure.max, figure.floor_share, figure.floors) == (5, 5, 5, None, {})
    assert figure.rows_equal == 1.0
    assert found.others == [{"workload": "plan", "seconds": 1.5}]
    console = silent_console()
    draw_stored(path, None, console)
    assert "ctranslate2" in console_text(console)
    assert "plan" in console_text(console)


def test_ratios_are_of_one_run_even_if_files_are_joined() -> None:
    """A later file's figure of batchgen replaces the first one's, so the ratio is the inverse of the peer's."""
    ours, peer = (figure for figure in made()[:3] if figure.metric == "output_tokens_per_second")
    peer = replace(peer, ratio={"batchgen": {"median": 0.4, "min": 0.25, "max": 0.5}}, date="1")
    later = replace(ours, date="2", ratio={"other": {"median": 9.0, "min": 9.0, "max": 9.0}})
    assert ours_over(peer, [later, peer]) == Spread(2.5, 2.0, 4.0)
    same = replace(ours, date="1")
    assert ours_over(peer, [later, same, peer]) == Spread(**ours.ratio[peer.engine])
    assert ours_over(later, [later, peer]) is None
    assert ours_over(replace(peer, ratio={}), [later]) is None


def wrong(**values: Any) -> str:
    return json.dumps({"workload": "w", "engine": "e", "metric": "m", "value": 1.0} | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no figures"),
        ("{", "line 1 is not JSON"),
        ("\n[1]", "line 2 is not a JSON object"),
        (wrong(value="fast"), "line 1: `value` must be a number, got 'fast'"),
        (wrong(value=True), "`value` must be a number, got True"),
        (wrong(value=float("nan")), "`value` must be a number, got nan"),
        (wrong(engine=["e"]), "`engine` must be a text"),
        (wrong(repeat=1.5), "`repeat` must be a whole number, got 1.5"),
        (wrong(setting=[1]), "`setting` must be an object"),
        (wrong(ratio={"x": 2.0}), "`ratio` must be an object"),
        (wrong(ratio={"x": {"median": 0, "min": 1, "max": 1}}), "`ratio` of x must have median, min, max above 0"),
        (wrong(floors={"serial": {}}), "`floors` of serial must have share above 0"),
        ('{"metric": "left_out", "reason": "why"}', "`left_out` needs an `engine`"),
        (None, "cannot read"),
    ],
)
def test_invalid_figures_are_rejected(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "wrong.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_figures(path)


def test_skipped_peers_are_read_back_and_shown(stored: Path) -> None:
    skipped = [
        SkippedPeer("random:toy", "peer-three", None, "cannot import <it>"),
        SkippedPeer("random:toy", "peer-one", "logprobs", "not asked"),
        SkippedPeer("random:toy", "peer-two", "unique", "measured in a later run"),
        SkippedPeer("random:toy", "peer-two", None, "measured in a later run"),
    ]
    stored.write_text("".join(peer.to_json() + "\n" for peer in skipped) + stored.read_text())
    assert read_figures(stored).skipped == skipped[:2]
    console = silent_console(70)
    draw_stored(stored, None, console)
    text = console_text(console)
    assert "left out: peer-three: cannot import <it>\nleft out: peer-one of logprobs: not asked\n" in text
    assert "later run" not in text


# Tables


def shown(figures: list[Figure], width: int, *, terminal: bool = True) -> list[str]:
    console = silent_console(width, terminal=terminal)
    print_comparison(figures, console)
    return [line.rstrip() for line in console_text(console).splitlines()]


def test_a_wide_table_has_all_columns() -> None:
    head, ours, one, two, special = shown(made(), 160)
    for name in ("workload", "setting", "format", "tokens/CPU-s", "floor", "serial", "batchgen over it", "% slower"):
        assert name in head
    assert ours.split() == ["unique", "batchgen", "bfloat16", "800.0", "(800.0-800.0)", "400.0", "80%", "120%"]
    assert one.endswith("1.25 (1.25-1.25)")
    assert "batch 8" in one
    assert two.endswith("0.50 (0.50-0.50)")
    assert special.endswith("50.0 (50.0-50.0)")
    assert shown(made(), 40, terminal=False) == shown(made(), 160), "without a terminal there is no width"


def test_names_are_shown_as_they_are_and_unequal_engines_are_marked() -> None:
    odd = [replace(f, workload="[red]x[/red]", rows_equal=0.8 if f.engine == "peer-one" else 1.0) for f in made()]
    text = "\n".join(shown(odd, 160))
    assert "[red]x[/red]" in text
    assert "peer-one (80% equal)" in text
    assert "peer-two (" not in text


@pytest.mark.parametrize("width", [10, 30, 45, 60, 80, 100, 130, 200])
def test_a_narrow_terminal_truncates_nothing(width: int) -> None:
    if width >= 30:
        lines = shown(made(), width)
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
        assert any("640.0" in line and "1.25" in line for line in lines)
    others = [{"workload": "plan", "shape": s, "seconds": 0.25, "rows": 5000, "phases": {}} for s in ("tree", "flat")]
    others[1]["seconds"] = 1.5
    console = silent_console(width, terminal=True)
    print_others(others, console)
    printed = console_text(console).splitlines()
    assert max(map(len, printed)) <= width
    assert (printed[0], printed[-1]) == ("plan", "rows 5,000")
    for text in ("tree", "flat", "0.25", "1.5"):
        assert any(text in line and "…" not in line for line in printed)


# The picture


def test_charts_are_checked_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "find_spec", lambda name: name)
    check_chart(tmp_path / "x.png")
    check_chart(tmp_path / "x.SVG")
    with pytest.raises(UsageError, match=r"must end in .png or .svg, got x.html"):
        check_chart(Path("x.html"))
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        check_chart(tmp_path / "none" / "x.png")
    for workload in ("plan", "startup", "job"):
        assert run_command(["bench", workload, "--chart", str(tmp_path / "x.png")]) == 2
        captured = capsys.readouterr()
        assert "there are no bars to draw" in captured.err
        assert captured.out == ""
    monkeypatch.setattr(show, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs matplotlib, .* pip install 'batchgen\[report\]'"):
        check_chart(tmp_path / "x.png")


def test_the_picture_has_every_panel_and_number(stored: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peer = SkippedPeer("random:toy", "peer-three", None, "not installed")
    stored.write_text(peer.to_json() + "\n" + stored.read_text())
    assert run_command(["bench", "--from", str(stored), "--chart", str(tmp_path / "x.svg")]) == 0
    picture = (tmp_path / "x.svg").read_text(encoding="utf-8")
    for text in (
        "random:toy: unique", "random:toy: logprobs", "slowdown", "peer-two", "unique / peer-one", "1.25", "0.50",
        "800 (80%)", "1,600 (160%)", "50.0", "arithmetic floor 1,000", "A &lt;CPU&gt; &amp; $more$",
        "commit 0123456789ab", "left out: peer-three: not installed",
    ):  # fmt: skip
        assert text in picture, text
    write_chart(tmp_path / "x.png", StoredFigures(made()))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "y.png").mkdir()
    with pytest.raises(OutputError, match="cannot write the chart"):
        write_chart(tmp_path / "y.png", StoredFigures(made()))
    with pytest.raises(UsageError, match="there are no bars to draw"):
        write_chart(tmp_path / "z.png", StoredFigures([], [{"workload": "plan"}]))


def test_stored_figures_are_shown_without_the_measuring_code(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "batchgen.bench.run", raising=False)
    assert run_command(["bench", "--from", str(stored)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "640.0" in captured.err
    assert "batchgen.bench.run" not in sys.modules
    for more in (["unique"], ["--config", "x.toml"], ["--repeat", "2"]):
        assert run_command(["bench", "--from", str(stored), *more]) == 2
        assert "combined with --chart only" in capsys.readouterr().err
