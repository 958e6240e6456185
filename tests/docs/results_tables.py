"""Tables of benchmark results, made from the JSON lines in `configs/bench/results/`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from batchgen.bench.figures import Figure, read_figures

RESULTS = Path(__file__).parents[2] / "configs" / "bench" / "results"
_SHORT = "cpu-135m-zen5.jsonl"
_METRIC = "output_tokens_per_second"
_NAMES = {"batchgen": "batchgen", "openvino": "OpenVINO GenAI", "vllm": "vLLM", "transformers": "transformers"}
_OURS = "batchgen"


def short_table() -> str:
    """The README's table: one row for each workload, with the ratio to the better of the other engines."""
    figures = _figures(RESULTS / _SHORT)
    peers = _peers(figures)
    lines = [
        f"| workload | batchgen | {' | '.join(_NAMES[peer] for peer in peers)} | batchgen / best other |",
        "|---|---" + "|---" * len(peers) + "|---|",
    ]
    for workload in dict.fromkeys(name for name, _ in figures):
        ours = figures[workload, _OURS]
        best = min(ours.ratio[peer]["median"] for peer in peers)
        values = " | ".join(f"{figures[workload, peer].value:,.0f}" for peer in peers)
        lines.append(f"| `{workload}` | **{ours.value:,.0f}** | {values} | {best:.2f} |")
    note = "The last column is the median of the ratios of paired runs, not the ratio of the medians shown."
    return "\n".join([*lines, "", f"{_setting(figures)}.", note]) + "\n"


def full_tables() -> str:
    """A table for each results file, with spreads and shares of the roofline floors."""
    return "\n".join(map(_any_table, sorted(RESULTS.glob("*.jsonl"))))


def _any_table(path: Path) -> str:
    found = read_figures(path)
    if found.figures:
        return _table(path)
    table = _TABLES[found.others[0]["workload"]](found.others)
    return "\n".join((f"### {path.stem}", "", *table)) + "\n"


def _load_table(lines: list[dict[str, Any]]) -> list[str]:
    """Large jobs: what must not grow."""
    table = [
        f"`python -m tests.e2e.load`: {lines[0]['processors']} threads of an {lines[0]['cpu']}, with a model that "
        "computes nothing. Other programs ran on the machine. Rates are rows per processor second of the generating "
        "phase.",
        "",
        "| job | rows | seconds | first tenth | last tenth | memory of no file | open files | finish |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        rates = [f"{rate:,}" if rate else "" for rate in (line["rate_first_tenth"], line["rate_last_tenth"])]
        handles = f"{line['handles_first_half']}, then {line['handles_last_half']}"
        table.append(
            f"| {line['description']} | {line['rows']:,} | {sum(line['seconds'].values()):.0f} | {' | '.join(rates)} | "
            f"{line['peak_anonymous_bytes'] / 2**20:.0f} MiB | {handles} | {line['finish_share']}% |"
        )
    return table


def _eta_table(lines: list[dict[str, Any]]) -> list[str]:
    """How well the time left was estimated."""
    first = lines[0]
    table = [
        f"`batchgen bench eta`: one thread of an {first['cpu']}, processor seconds, {first['repeat']} run of each job. "
        "Errors of the estimated time left, relative to the time that was left. Other programs ran on the machine: the "
        "command had the given share of one processor.",
        "",
        "| job | seconds | at 5% | 10% | 25% | 50% | 75% | 90% | within 10% | worst by rows | share |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        errors = " | ".join("" if error is None else f"{error:+.0f}%" for error in line["errors"].values())
        by_rows = "" if line["by_rows_worst_error"] is None else f"{line['by_rows_worst_error']:,.0f}%"
        table.append(
            f"| {line['description']} | {line['seconds']:.0f} | {errors} | {line['within_10_percent']:.0f}% of lines | "
            f"{by_rows} | {line['processor_share']:.0%} |"
        )
    return table


def _embed_table(lines: list[dict[str, Any]]) -> list[str]:
    """Embeddings, next to sentence-transformers."""
    first = lines[0]
    table = [
        f"`batchgen bench embed`: {first['rows']:,} texts, {first['tokens']:,} tokens, `{first['model']}`, "
        f"{first['threads']} threads of an {first['cpu']}, medians of {first['repeat']} runs.",
        "",
        "| engine | dtype | tokens/s | batchgen over it | least cosine |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        dtype = "float32" if line["dtype"] == "auto" else line["dtype"]
        table.append(
            f"| {line['engine']} | {dtype} | {line['tokens_per_second']:,.0f} | {line['ratio']:.2f} | "
            f"{line['least_cosine']:.6f} |"
        )
    return table


def _forecast_table(lines: list[dict[str, Any]]) -> list[str]:
    """What `batchgen plan` predicted."""
    table = [
        f"`batchgen bench forecast`: one thread of an {lines[0]['cpu']}, processor seconds of whole commands. The true "
        f"time is in the 90 % interval of {sum(line['in_range'] for line in lines)} of {len(lines)} jobs.",
        "",
        "| job | seconds | predicted | 90 % interval | error | limited by |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        table.append(
            f"| {line['description']} | {line['seconds']:.0f} | {line['predicted']:.0f} | {line['low']:.0f} to "
            f"{line['high']:.0f} | {line['error']:+.0f}% | {line['limited_by']} |"
        )
    return table


def _scale_table(lines: list[dict[str, Any]]) -> list[str]:
    """One job in several ways, undisturbed and with something killed."""
    first = lines[0]
    table = [
        f"`python -m tests.e2e.scale`: {first['rows']:,} rows of `{first['model']}` in float32 with `--deterministic` "
        f"on {first['processors']} threads of an {first['cpu']}, which all ways share. Wall seconds of the command or "
        "of all commands; rows are compared with those of one process.",
        "",
        "| way | seconds | rows equal | killed | seconds | rows equal |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        equal, after = ("yes" if line[key] else "no" for key in ("equal", "equal_killed"))
        table.append(
            f"| {line['way']} | {line['seconds']:.0f} | {equal} | {line['killed']} | {line['seconds_killed']:.0f} | "
            f"{after} |"
        )
    return table


def _offload_table(lines: list[dict[str, Any]]) -> list[str]:
    """A model on devices of several sizes that its weights do not fit on."""
    first = lines[0]
    table = [
        f"`python -m tests.e2e.offload --offload {first['offload']}`: {first['rows']:,} rows of "
        f"{first['prompt_tokens']} and {first['output_tokens']} tokens, `{first['model']}` "
        f"({first['weight_bytes'] / 1e6:,.0f} MB) on "
        f"{first['device']}, {first['processors']} threads of an {first['cpu']}; copies of "
        f"{first['copy_bytes_per_second'] / 1e9:.1f} GB/s.",
        "",
        "| share of the device | blocks streamed | rows at once | passes | copied | as planned | floor | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        size = "all" if line["share"] is None else f"{line['share']:.0%}"
        exact = line["copied_bytes"] == line["planned_bytes"] and line["same_tokens"]
        table.append(
            f"| {size} | {line['streamed_blocks']} of {line['blocks']} | {line['rows_at_once']:,} | "
            f"{line['passes']:,} | {line['copied_bytes'] / 1e9:,.2f} GB | {'yes' if exact else 'no'} | "
            f"{line['floor_seconds']:.1f} s | {line['seconds']:.1f} s |"
        )
    return table


def _ranks_table(lines: list[dict[str, Any]]) -> list[str]:
    """A model split over processes that share the cores of one machine."""
    first, by_count = lines[0], dict[int, list[dict[str, Any]]]()
    for line in lines:
        by_count.setdefault(line["processes"], []).append(line)
    table = [
        f"`python -m tests.e2e.ranks`: {first['rows']:,} rows of {first['prompt_tokens']} and "
        f"{first['output_tokens']} tokens, `{first['model']}` in float32, {first['processors']} threads of an "
        f"{first['cpu']}, which the processes share; medians of {len(by_count[1])} interleaved runs (min to max).",
        "",
        "| processes | weights of the first | tokens/s | of one process | predicted | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    one = median(line["seconds"] for line in by_count[1])
    for count, runs in by_count.items():
        rates, seconds = [line["tokens_per_second"] for line in runs], median(line["seconds"] for line in runs)
        predicted = one / median(line["predicted_seconds"] for line in runs)
        table.append(
            f"| {count} | {runs[0]['weight_bytes'] / 1e6:,.0f} MB | {median(rates):,.0f} ({min(rates):,.0f} to "
            f"{max(rates):,.0f}) | {one / seconds:.2f} | {predicted:.2f} | "
            f"{'yes' if all(line['same_tokens'] for line in runs) else 'no'} |"
        )
    return table


_TABLES = {
    "ranks": _ranks_table,
    "offload": _offload_table,
    "load": _load_table,
    "eta": _eta_table,
    "embed": _embed_table,
    "forecast": _forecast_table,
    "scale": _scale_table,
}


def _table(path: Path) -> str:
    figures = _figures(path)
    lines = [
        f"### {path.stem}",
        "",
        f"{_setting(figures)}. Medians of {next(iter(figures.values())).repeat} interleaved runs (min to max). "
        '"batchgen over it" is the median of the ratios of paired runs, not the ratio of the medians.',
        "",
        "| workload | engine | tokens/s | batchgen over it | share of the floor | rows equal |",
        "|---|---|---|---|---|---|",
    ]
    for (workload, engine), figure in figures.items():
        ratio = figures[workload, _OURS].ratio.get(engine)
        over = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        share = "" if figure.floor_share is None else f"{figure.floor_share:.0%}"
        version = figure.version.partition("-")[0]
        lines.append(
            f"| `{workload}` | {_NAMES.get(engine, engine)} {version} | {figure.value:,.0f} ({figure.min:,.0f} to "
            f"{figure.max:,.0f}) | {over} | {share} | {figure.rows_equal:.0%} |"
        )
    return "\n".join(lines) + "\n"


def _figures(path: Path) -> dict[tuple[str, str], Figure]:
    """(workload, engine) -> its rate."""
    stored = read_figures(path).figures
    return {(figure.workload, figure.engine): figure for figure in stored if figure.metric == _METRIC}


def _peers(figures: dict[tuple[str, str], Figure]) -> list[str]:
    return sorted({engine for _, engine in figures} - {_OURS})


def _setting(figures: dict[tuple[str, str], Figure]) -> str:
    """Model, dtype and machine of the figures, in words."""
    figure = next(iter(figures.values()))
    model = "The demonstration model" if figure.model == "demo" else f"`{figure.model}`"
    return f"{model}, {figure.dtype}, {figure.threads} threads of an {figure.cpu} ({figure.gemm_gflops:,.0f} GFLOP/s)"
