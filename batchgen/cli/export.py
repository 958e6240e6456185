"""`batchgen export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli.flags import GroupedCommand

__all__ = ["register"]


class Format(StrEnum):
    """Shapes of an export."""

    OPENAI_BATCH = "openai-batch"
    JSONL = "jsonl"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("export", cls=GroupedCommand, no_args_is_help=True)(export)


def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Finished result file. Example: results.parquet")],
    shape: Annotated[
        Format,
        typer.Option(
            "--format",
            metavar="openai-batch|jsonl",
            help="OpenAI's batch output and errors, or one object a sample. Example: --format openai-batch",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            show_default=False,
            help="File to write, - for stdout. Default: OUT.openai.jsonl, with OUT.openai.errors.jsonl beside it, or "
            "OUT.jsonl. Example: -o batch_output.jsonl",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="The run's tokenizer, if it has moved: logprobs need it. Example: --tokenizer ./tok",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files. Example: --overwrite")] = False,
) -> None:
    """Write finished results in another shape.

    Example: batchgen export results.parquet --format openai-batch
    """
    from batchgen.job.export import ExportFormat, export_results  # pyarrow: time that `--help` must not pay

    chosen: ExportFormat = "jsonl" if shape is Format.JSONL else "openai-batch"
    export_results(out, chosen, output, overwrite=overwrite, tokenizer=tokenizer)
