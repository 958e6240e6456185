"""`batchgen bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from batchgen.cli.flags import GroupedCommand
from batchgen.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("bench", cls=GroupedCommand)(bench)


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            show_default=False,
            help="unique, shared-prefix, few-shot-tree, mixed-lengths (none named: these four), multi-turn, n-samples, "
            "json-constrained, logprobs, hidden-states, many-loras, all (of these), demo (with --model demo), or a "
            ".toml file. For GPUs: w-nano, w-prefix, w-unshared, w-tree. Without engines to compare: plan (the planner "
            "alone), startup (to the help, to the first token), job (what a row costs beside the model). "
            "Example: shared-prefix",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Model folder or id, or random weights of a shape: random:135m, random:5m, random:0.6b, "
            "random:1b, random:8b, or demo, the demonstration model. Default: random:135m. "
            "Example: --model random:5m",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="PEERS",
            show_default=False,
            help="auto (transformers, if this Python can import it), none, or names, each with the Python that runs "
            "it. Known: transformers, transformers-continuous, vllm, sglang, openvino, onnxruntime-genai, ctranslate2, "
            "llama.cpp, baseline=FOLDER (another checkout of batchgen), deterministic (this one with that option) and "
            "first-come (this one, rows begun in input order). One that cannot run is named on stderr and left out. "
            "Default: auto. Example: --peers transformers=/opt/hf/bin/python",
        ),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Interleaved repeats. Default: 5. Example: --repeat 3")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", show_default=False, help="As for run. Default: auto. Example: --dtype float32"),
    ] = None,
    peer_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="best|asked",
            show_default=False,
            help="best: a peer takes float32 where the processor multiplies that faster than the asked dtype, "
            "and its figures say so; asked: peers compute in --dtype or are left out. Default: best. "
            "Example: --peer-dtype asked",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", show_default=False, help="As for run. Default: auto. Example: --device cpu"),
    ] = None,
    cpu_threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default=False, help="Threads of every engine. Example: --cpu-threads 2"),
    ] = None,
    plan_size: Annotated[
        str | None,
        typer.Option(
            metavar="ROWSxTOKENS",
            show_default=False,
            help="Prompts of workload plan and the ids of each; the ids take 4 bytes each in the folder for temporary "
            "files. Default: 1000000x500. Example: --plan-size 100000x500",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw the figures: an .html page that needs no network, or a .png where matplotlib is installed. "
            "Example: --chart bench.html",
        ),
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            show_default=False,
            help="Measure nothing: compare and draw the JSON lines of earlier runs. Example: --from figures.jsonl",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            show_default=False,
            help="Time that an engine has for one answer: to load and convert the model, or for one pass; then it is "
            "ended and, a peer, left out. Default: 900. Example: --timeout 3600",
        ),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="JSON lines of an earlier run: peers keep the settings that were found there for the same workload, "
            "model, dtype, device and threads; others are found by trying. Example: --tuned figures.jsonl",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="TOML file of workloads and options, whose place flags take. Example: --config "
            "configs/bench/runs/cpu-135m.toml",
        ),
    ] = None,
) -> None:
    """Measure named workloads against the machine's floor and against installed peers: one JSON line per figure.

    Greedy ids are compared first; nothing is printed of an engine that generates something else. The exit status is 1
    when batchgen itself fails, or every peer that was tried; peers that do not ask for a workload's field are not.

    Example: batchgen bench shared-prefix --peers transformers --repeat 5 > figures.jsonl
    """
    from batchgen.job.bench.command import bench_config, draw_stored, run_command  # not for other commands' help

    console = Console(stderr=True, highlight=False)
    given = {
        "workloads": tuple(workloads) if workloads else None, "model": model, "peers": peers, "repeat": repeat,
        "dtype": dtype, "peer_dtype": peer_dtype, "device": device, "threads": cpu_threads, "plan_size": plan_size,
        "timeout": timeout, "tuned": tuned,
    }  # fmt: skip
    if stored is not None:
        if config is not None or any(value is not None for value in given.values()):
            raise UsageError("--from draws the figures that a file holds; beside it only --chart has a meaning")
        draw_stored(stored, chart, console)
    else:
        run_command(bench_config({**given, "chart": chart}, config), typer.echo, console)
