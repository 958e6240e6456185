"""`batchgen bench --from` and `--chart`: stored figures, the table in a terminal, the HTML page and the PNG."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
from rich.console import Console

from batchgen.bench import chart as chart_module
from batchgen.bench.chart import check_chart, draw_stored, page, write_chart
from batchgen.bench.figures import Context, Figure, Measured, Spread, ours_over, workload_figures
from batchgen.bench.floors import FloorWork
from batchgen.bench.panels import Bar, Panel, sections
from batchgen.bench.process import Generated
from batchgen.bench.rates import MatmulRate
from batchgen.bench.results import SkippedPeer, StoredFigures, read_figures
from batchgen.bench.svg import NARROW, WIDE, chart, linear_ticks, log_ticks
from batchgen.bench.table import comparison, print_comparison, print_others
from batchgen.bench.workload_defs import MORE_WORKLOADS, WORKLOADS
from batchgen.cli.app import run_command
from batchgen.errors import OutputError, UsageError

RATES = {
    "unique": {"batchgen": 800.0, "peer-one": 640.0, "peer-two": 1600.0},
    "logprobs": {"batchgen": 400.0},
}
"""Workload -> engine -> tokens per second. Their ratios are exact in binary, so the page's numbers are too."""
VOID = {"meta", "line", "rect", "circle", "path"}


def made() -> list[Figure]:
    context = Context(
        "Some <processor> & more", "0123456789ab", 2, MatmulRate(8e9, "plain"), 2e9, {"torch": "2"}, "2026-11"
    )
    found = []
    for name, rates in RATES.items():
        engines = []
        for engine, rate in rates.items():
            passes = [Generated([[0] * 100], 100 / r, 200 / r) for r in (rate, rate)]
            bare = [Generated([[0] * 100], 50 / rate, 100 / rate)] * 2 if name == "logprobs" else []
            setting = {"batch": 8} if engine == "peer-one" else {}
            engines.append(Measured(engine, "1.2", "bfloat16", "cpu", 2, setting, 1.0, passes, bare))
        work = FloorWork(
            9, 9, 9, 100, flops=8e8, prompt_flops=4e8, decode_flops=4e8, decode_bytes=1e8, resident_bytes=0
        )
        found += workload_figures(name, "random:toy", engines, work, context)
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "figures.jsonl"
    path.write_text("".join(figure.to_json() + "\n" for figure in made()))
    return path


class Checked(HTMLParser):
    """Parser that fails on unbalanced tags and collects the visible texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


# Stored figures


def test_stored_figures_are_read_back_unchanged(stored: Path) -> None:
    found = read_figures(stored)
    assert [asdict(figure) for figure in found.figures] == [asdict(figure) for figure in made()]
    assert found.others == []


def test_a_later_figure_with_the_same_key_replaces_the_first(stored: Path) -> None:
    first = made()[0]
    with stored.open("a") as stream:
        stream.write("\n" + replace(first, value=7.0).to_json() + "\n")
        stream.write(replace(first, model="random:other").to_json() + "\n")
    found = read_figures(stored).figures
    assert len(found) == len(made()) + 1
    assert [f.value for f in found if (f.model, f.workload, f.engine, f.metric) == _key(first)] == [7.0]


def _key(figure: Figure) -> tuple[str, str, str, str]:
    return figure.model, figure.workload, figure.engine, figure.metric


def test_figures_of_older_and_newer_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    old = {"workload": "unique", "engine": "batchgen", "metric": "output_tokens_per_second", "value": 5, "new": [1]}
    path.write_text(json.dumps(old) + "\n" + json.dumps({"workload": "plan", "seconds": 1.5}) + "\n")
    found = read_figures(path)
    (figure,) = found.figures
    assert figure.rows_equal == 1.0
    assert (figure.value, figure.min, figure.max, figure.floor_share, figure.floors) == (5, 5, 5, None, {})
    assert found.others == [{"workload": "plan", "seconds": 1.5}]
    assert "plan" in page(found.figures, found.others)


def wrong(**values: Any) -> str:
    return json.dumps({"workload": "w", "engine": "e", "metric": "m", "value": 1.0} | values)


def test_ratios_are_of_one_run_even_if_files_are_joined(stored: Path) -> None:
    """A later file's figure of batchgen replaces the first one's, so the ratio is the inverse of the peer's."""
    rates = [f for f in made() if f.metric == "output_tokens_per_second"]
    ours = next(f for f in rates if f.engine == "batchgen" and f.ratio)
    name = next(iter(ours.ratio))
    back = {"batchgen": {"median": 0.4, "min": 0.25, "max": 0.5}}
    peer = replace(next(f for f in rates if f.engine == name and f.workload == ours.workload), ratio=back, date="1")
    later = replace(ours, date="2", ratio={"other": {"median": 9.0, "min": 9.0, "max": 9.0}})
    assert ours_over(peer, [later, peer]) == Spread(2.5, 2.0, 4.0)
    same = replace(ours, date="1")
    assert ours_over(peer, [later, same, peer]) == Spread(**ours.ratio[name])
    assert ours_over(later, [later, peer]) is None
    assert ours_over(replace(peer, ratio={}), [later]) is None


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
    ],
)
def test_invalid_figures_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_figures(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_figures(tmp_path / "none.jsonl")


# The comparison


def shown(width: int, terminal: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_comparison(made(), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_a_wide_terminal_shows_all_columns() -> None:
    head, ours, one, two, special = shown(160)
    for name in ("workload", "setting", "format", "tokens/CPU-s", "floor", "serial", "batchgen over it", "% slower"):
        assert name in head
    assert ours.split() == ["unique", "batchgen", "bfloat16", "800.0", "(800.0-800.0)", "400.0", "80%", "120%"]
    assert one.endswith("1.25 (1.25-1.25)")
    assert "batch 8" in one
    assert two.endswith("0.50 (0.50-0.50)")
    assert special.endswith("50.0 (50.0-50.0)")


@pytest.mark.parametrize("width", [30, 45, 60, 80, 100, 130])
def test_a_narrow_terminal_drops_columns_but_truncates_nothing(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert any("640.0" in line and "1.25" in line for line in lines)


def test_output_without_a_terminal_has_all_columns() -> None:
    assert shown(40, terminal=False) == shown(160)


def test_markup_in_names_is_not_interpreted() -> None:
    odd = [replace(figure, workload="[red]x[/red]") for figure in made()]
    console = Console(file=io.StringIO(), width=120)
    console.print(comparison(odd, 120))
    assert "[red]x[/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_engine_below_full_equality_is_marked() -> None:
    odd = [replace(figure, rows_equal=0.8) if figure.engine == "peer-one" else figure for figure in made()]
    console = Console(file=io.StringIO(), width=160)
    print_comparison(odd, console)
    assert "peer-one (80% equal)" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "peer-one (80% equal)" in page(odd)


# The page


def test_the_page_is_self_contained_and_has_every_number(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.html"
    draw_stored(stored, out, Console(file=io.StringIO()))
    text = out.read_text(encoding="utf-8")
    parsed = Checked(text)
    assert parsed.links == []
    assert "script" not in parsed.seen
    assert "http" not in text
    assert parsed.seen["table"] == 4, "ratios, slowdowns and two workloads"
    assert parsed.seen["svg"] == 8, "each chart for wide and for narrow pages"
    visible = "\n".join(parsed.texts)
    for number in ("800", "640", "1,600", "400", "1.25", "0.50", "50.0 %", "arithmetic floor 1,000", "80%", "120%"):
        assert number in visible, number
    for fact in ("Some <processor> & more", "0123456789ab", "torch 2", "batch 8", "8 GFLOP/s (plain)", "random:toy"):
        assert fact in visible, fact


def test_colours_of_the_page_are_defined_for_light_and_dark() -> None:
    text = page(made())
    light, dark = (part.split("}")[0] for part in text.split(":root { --")[1:3])
    for part in (light, dark):
        assert {name.partition(":")[0] for name in ("--" + part).replace(" ", "").split(";")} >= {
            f"--{name}" for name in _used(text)
        }


def _used(text: str) -> set[str]:
    return {piece.split(")")[0] for piece in text.split("var(--")[1:]}


def test_bar_lengths_are_proportional_to_their_values() -> None:
    bars = [Bar("a", 10.0, 9.0, 11.0, True), Bar("b", 5.0, 5.0, 5.0, False)]
    root = ElementTree.fromstring(chart(Panel("t", "u", bars, [], [], floor=20.0)))
    one, two = (float(rect.get("width", "")) for rect in root.iter("rect"))
    assert one == pytest.approx(2 * two, abs=0.2)
    floor = next(line for line in root.iter("line") if line.get("class") == "floor")
    start = min(float(rect.get("x", "")) for rect in root.iter("rect"))
    assert float(floor.get("x1", "")) - start == pytest.approx(2 * one, abs=0.3)


def test_a_floor_far_above_the_bars_is_not_drawn() -> None:
    drawn = chart(Panel("t", "u", [Bar("a", 10.0, 9.0, 11.0, True)], [], [], floor=1000.0))
    assert 'class="floor"' not in drawn


def test_negative_bars_start_at_zero() -> None:
    root = ElementTree.fromstring(chart(Panel("t", "%", [Bar("a", -5.0, -6.0, -4.0, True)], [], [])))
    rect = next(root.iter("rect"))
    base = next(line for line in root.iter("line") if line.get("class") == "base")
    assert float(rect.get("x", "")) + float(rect.get("width", "")) == pytest.approx(float(base.get("x1", "")), abs=0.2)


def test_ratios_have_a_logarithmic_axis() -> None:
    bars = [Bar("w", ratio, ratio, ratio, True, series=str(ratio)) for ratio in (1.0, 2.0, 4.0)]
    root = ElementTree.fromstring(chart(Panel("t", "u", bars, [], [], times=True)))
    dots = [float(c.get("cx", "")) for group in root.iter("g") for c in group.iter("circle")]
    assert dots[1] - dots[0] == pytest.approx(dots[2] - dots[1], abs=0.2)
    base = next(line for line in root.iter("line") if line.get("class") == "base")
    assert float(base.get("x1", "")) == pytest.approx(dots[0], abs=0.1)


def test_ticks_are_round() -> None:
    assert linear_ticks(0.0, 1200.0) == [0, 200, 400, 600, 800, 1000, 1200]
    assert linear_ticks(-3.0, 7.0) == [-4, -2, 0, 2, 4, 6]
    assert linear_ticks(0.0, 0.0) == [0.0]
    assert log_ticks(1.0, 1.7) == pytest.approx([1, 1.2, 1.5, 2])
    assert log_ticks(1.0, 1.05) == pytest.approx([1, 1.1])
    assert log_ticks(0.9, 30.0) == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])


def test_each_model_has_a_section() -> None:
    figures = made() + [replace(figure, model="demo") for figure in made()]
    assert [section.model for section in sections(figures)] == ["random:toy", "demo"]
    assert page([]).count("<svg") == 0


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("letters", [3, 20, 40])
def test_names_and_numbers_stay_inside_the_chart(width: float, letters: int) -> None:
    bars = [Bar(c * letters, 1234.0, 1200.0, 1300.0, False, note="12%") for c in "ab"]
    for panel in (Panel("t", "u", bars, [], [], floor=2000.0), Panel("t", "u", bars, [], [], times=True)):
        root = ElementTree.fromstring(chart(panel, width))
        assert root.get("viewBox", "").split()[2] == str(int(width))
        for text in root.iter("text"):
            x, size = float(text.get("x", "")), 7.4 * len(text.text or "")
            start = {"start": x, "middle": x - size / 2, "end": x - size}[text.get("text-anchor", "")]
            assert (start > -3, start + size < width + 3) == (True, True), text.text


def test_peers_of_one_workload_have_separate_lanes() -> None:
    bars = [Bar(w, 2.0, 1.5, 2.5, True, series=peer) for w in ("one", "two") for peer in ("a", "b", "c")]
    root = ElementTree.fromstring(chart(Panel("t", "u", bars, [], [], times=True)))
    heights = [float(c.get("cy", "")) for group in root.iter("g") for c in group.iter("circle")]
    assert heights == sorted(heights)
    assert min(b - a for a, b in pairwise(heights)) > 10


# Peers without figures


def test_skipped_peers_are_read_back_and_shown(stored: Path, tmp_path: Path) -> None:
    skipped = [
        SkippedPeer("random:toy", "peer-three", None, "cannot import <it>"),
        SkippedPeer("random:toy", "peer-one", "logprobs", "not asked"),
        SkippedPeer("random:toy", "peer-two", "unique", "measured in a later run"),
        SkippedPeer("random:toy", "peer-two", None, "measured in a later run"),
    ]
    stored.write_text("".join(peer.to_json() + "\n" for peer in skipped) + stored.read_text())
    assert read_figures(stored).skipped == skipped[:2]
    console = Console(file=io.StringIO(), width=70)
    draw_stored(stored, tmp_path / "x.html", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "left out: peer-three: cannot import <it>\nleft out: peer-one of logprobs: not asked\n" in text
    assert "later run" not in text
    texts = Checked((tmp_path / "x.html").read_text(encoding="utf-8")).texts
    assert {"peer-three", ", all workloads: cannot import <it>", ", logprobs: not asked"} <= set(texts)
    (tmp_path / "none.jsonl").write_text('{"metric": "left_out", "reason": "why"}')
    with pytest.raises(UsageError, match="`left_out` needs an `engine`"):
        read_figures(tmp_path / "none.jsonl")


# Workloads without engines


@pytest.mark.parametrize("width", [10, 30, 50, 200])
def test_other_figures_fit_any_terminal_width(width: int) -> None:
    lines = [{"workload": "plan", "shape": s, "seconds": 0.25, "rows": 5000, "phases": {}} for s in ("tree", "flat")]
    lines[1]["seconds"] = 1.5
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_others(lines, console)
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, printed)) <= width
    assert not any("…" in line for line in printed)
    assert printed[0] == "plan"
    assert printed[-1] == "rows 5,000"
    for text in ("tree", "flat", "0.25", "1.5"):
        assert any(text in line for line in printed)


# Files


def test_chart_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chart(tmp_path / "x.html")
    with pytest.raises(UsageError, match=r"must end in .html or .png, got x.svg"):
        check_chart(Path("x.svg"))
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        check_chart(tmp_path / "none" / "x.html")
    monkeypatch.setattr(chart_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="a PNG needs matplotlib, which is not installed; name"):
        check_chart(tmp_path / "x.png")


@pytest.mark.parametrize("workload", ["plan", "startup", "job"])
def test_png_of_workloads_without_engines_is_rejected_before_measuring(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", workload, "--chart", str(tmp_path / "x.png")]) == 2
    captured = capsys.readouterr()
    assert "a PNG has no tables, and there are no bars to draw; name a .html file" in captured.err
    assert captured.out == ""


def test_unwritable_chart_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "x.html").mkdir()
    with pytest.raises(OutputError, match="cannot write the chart"):
        write_chart(tmp_path / "x.html", StoredFigures(made()))


def test_the_png_has_every_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mocks of matplotlib, which is not a dependency."""
    axes = [MagicMock() for _ in range(4)]
    figure = MagicMock()
    figure.subplots.return_value.__getitem__.return_value = axes
    figure.savefig.side_effect = lambda path, dpi: path.write_bytes(b"png")
    library = MagicMock()
    library.Figure.return_value = figure
    monkeypatch.setattr(chart_module.importlib, "import_module", lambda name: library)
    peer = SkippedPeer("random:toy", "peer-three", None, "not installed")
    write_chart(tmp_path / "x.png", StoredFigures(made(), skipped=[peer]))
    assert (tmp_path / "x.png").read_bytes() == b"png"
    assert axes[0].errorbar.call_args.args[0] == [1.25, 0.5]
    assert [axis.barh.call_args.args[1] for axis in axes[1:]] == [[50.0], [1600.0, 800.0, 640.0], [400.0]]
    assert [axis.set_title.call_args.args[0] for axis in axes[2:]] == [
        f"random:toy: {name} ({MORE_WORKLOADS.get(name, WORKLOADS.get(name)).description})" for name in RATES
    ]
    assert "left out: peer-three: not installed" in figure.supxlabel.call_args.args[0]
    assert [axis.annotate.call_args_list[0].args[0] for axis in axes] == ["1.25", "50.0", "1,600 (160%)", "400 (40%)"]
    with pytest.raises(UsageError, match="there are no bars to draw"):
        write_chart(tmp_path / "y.png", StoredFigures([], [{"workload": "plan"}]))


def test_the_command_draws_stored_figures(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "batchgen.bench.run", raising=False)
    out = tmp_path / "bench.html"
    assert run_command(["bench", "--from", str(stored), "--chart", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "640.0" in captured.err
    assert out.is_file()
    assert "batchgen.bench.run" not in sys.modules, "drawing does not import the measuring code"
    assert run_command(["bench", "unique", "--from", str(stored)]) == 2
    assert "combined with --chart only" in capsys.readouterr().err
