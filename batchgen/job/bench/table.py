"""The comparison for a person, on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from batchgen.job.bench.figures import Figure

__all__ = ["comparison"]


def comparison(figures: Sequence[Figure]) -> Table:
    """One line per workload and engine."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("workload", "engine", "setting", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s (min-max)", "tokens/CPU-s", "floor", "x peer"):
        table.add_column(name, no_wrap=True, justify="right")
    by_cpu = {(f.workload, f.engine): f.value for f in figures if f.metric == "output_tokens_per_cpu_second"}
    for figure in figures:
        if figure.metric != "output_tokens_per_second":
            continue
        table.add_row(
            figure.workload,
            figure.engine,
            ", ".join(f"{key} {value}" for key, value in figure.setting.items()),
            figure.dtype,
            f"{figure.value:,.1f} ({figure.min:,.1f}-{figure.max:,.1f})",
            f"{by_cpu[figure.workload, figure.engine]:,.1f}",
            f"{figure.floor_share:.0%}",
            ", ".join(f"{name} {r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for name, r in figure.ratio.items()),
        )
    return table
