"""The command `bench`."""

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
            help="Workloads: unique, shared-prefix, few-shot-tree, mixed-lengths (these four by default), multi-turn, "
            "n-samples, json-constrained, logprobs, hidden-states, many-loras, all (of these), demo (with --model "
            "demo), or a .toml file. For GPUs: w-nano, w-prefix, w-unshared, w-tree. Without peers: plan (planner "
            "only), startup (time to the help and to the first token), job (cost of a row outside the model). "
            "Example: shared-prefix",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Model folder or id, random weights of a size (random:5m, random:135m, random:0.6b, random:1b, "
            "random:8b), or demo, the demonstration model. Default: random:135m. Example: --model random:5m",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="PEERS",
            show_default=False,
            help="Engines to compare with: auto (transformers if it can be imported), none, or names, optionally with "
            "the Python that runs each: transformers, transformers-continuous, vllm, sglang, openvino, "
            "onnxruntime-genai, ctranslate2, llama.cpp, baseline=FOLDER (another checkout of batchgen), deterministic "
            "(batchgen with that option) and first-come (batchgen with rows in input order). A peer that cannot run is "
            "reported on stderr and skipped. Default: auto. Example: --peers transformers=/opt/hf/bin/python",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Number of interleaved repeats. Default: 5. Example: --repeat 3",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            show_default=False,
            help="Data type of the weights, as in run. Default: auto. Example: --dtype float32",
        ),
    ] = None,
    peer_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="best|asked",
            show_default=False,
            help="Data type of peers: best uses float32 if the processor computes it faster than --dtype and reports "
            "it; asked uses --dtype or skips the peer. Default: best. Example: --peer-dtype asked",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", show_default=False, help="Device, as in run. Default: auto. Example: --device cpu"
        ),
    ] = None,
    cpu_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Number of CPU threads of each engine. Example: --cpu-threads 2",
        ),
    ] = None,
    plan_size: Annotated[
        str | None,
        typer.Option(
            metavar="ROWSxTOKENS",
            show_default=False,
            help="Number of prompts of the workload plan and tokens of each; a token uses 4 bytes of temporary disk "
            "space. Default: 1000000x500. Example: --plan-size 100000x500",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write a chart of the results: a self-contained .html page, or a .png if matplotlib is installed. "
            "Example: --chart bench.html",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            show_default=False,
            help="Compare and draw the results of earlier runs, read from their JSON lines, without measuring. "
            "Example: --from figures.jsonl",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            show_default=False,
            help="Most seconds to load and convert a model, or for one pass; a peer that exceeds them is stopped and "
            "skipped. Default: 900. Example: --timeout 3600",
        ),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="JSON lines of an earlier run whose peer settings are reused for the same workload, model, dtype, "
            "device and threads; other settings are searched. Example: --tuned figures.jsonl",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="TOML file of workloads and options, which flags override. "
            "Example: --config configs/bench/runs/cpu-135m.toml",
        ),
    ] = None,
) -> None:
    """Benchmark workloads, alone and against other engines.

    Prints one JSON line per result, with shares of the machine's floor.
    Greedy token ids are compared first; an engine that generates other ids has no results. The exit code is 1 if
    batchgen or every peer that ran fails. Peers that do not support a field of a workload are not run.

    Example: batchgen bench shared-prefix --peers transformers --repeat 5 > figures.jsonl
    """
    from batchgen.bench.command import bench_config, draw_stored, run_command  # not needed by --help

    console = Console(stderr=True, highlight=False)
    given = {
        "workloads": tuple(workloads) if workloads else None, "model": model, "peers": peers, "repeat": repeat,
        "dtype": dtype, "peer_dtype": peer_dtype, "device": device, "threads": cpu_threads, "plan_size": plan_size,
        "timeout": timeout, "tuned": tuned,
    }  # fmt: skip
    if figures is not None:
        if config is not None or any(value is not None for value in given.values()):
            raise UsageError(
                "--from draws the results in a file; it can be combined with --chart only, remove the other arguments"
            )
        draw_stored(figures, chart, console)
    else:
        run_command(bench_config({**given, "chart": chart}, config), typer.echo, console)
