"""The commands `show`, `merge`, `export` and `verify`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.cli.flags import GroupedCommand

__all__ = ["EXIT_DIFFERENT", "register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("show", cls=GroupedCommand, no_args_is_help=True)(show)
    app.command("merge", cls=GroupedCommand, no_args_is_help=True)(merge)
    app.command("export", cls=GroupedCommand, no_args_is_help=True)(export)
    app.command("verify", cls=GroupedCommand, no_args_is_help=True)(verify)


def show(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Result file, folder of shards, or unfinished output. Example: results.parquet"
        ),
    ],
    row: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", show_default=False, help="Print all columns of input row N. Example: --row 7"),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="List only rows with an error. Example: --errors")] = False,
    finished: Annotated[
        bool,
        typer.Option(
            "--finished",
            help="Show the finished output even if newer unfinished work exists. Example: --finished",
        ),
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            show_default=False,
            help="Most samples to list; 0 is all. Default: 20. Example: --limit 100",
        ),
    ] = 20,
) -> None:
    """Print results in the terminal.

    Example: batchgen show results.parquet --errors
    """
    from batchgen.job.show import show_results, show_row  # imports pyarrow, which is slow

    if row is not None:
        show_row(out, row, finished=finished)
    else:
        show_results(out, errors_only=errors, limit=limit or None, finished=finished)


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(
            metavar="PART", help="Result files of the shards, or folders of them. Example: results.parquet/"
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="File to write. Example: -o all.parquet")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output file. Example: --overwrite")
    ] = False,
    allow_duplicate_ids: Annotated[
        bool,
        typer.Option(
            "--allow-duplicate-ids",
            help="Allow rows with the same id in different shards. Example: --allow-duplicate-ids",
        ),
    ] = False,
) -> None:
    """Merge the shards of one job into one file.

    Checks first that they are complete and belong together.

    Example: batchgen merge results.parquet/ -o all.parquet
    """
    from batchgen.data.merge import merge as merge_shards  # imports pyarrow, which is slow

    rows = merge_shards(parts, output, overwrite, allow_duplicate_ids=allow_duplicate_ids)
    typer.echo(f"{output}: {rows:,} rows", err=True)


class Format(StrEnum):
    """Formats of an export."""

    OPENAI_BATCH = "openai-batch"
    JSONL = "jsonl"


def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Finished result file. Example: results.parquet")],
    shape: Annotated[
        Format,
        typer.Option(
            "--format",
            metavar="openai-batch|jsonl",
            help="Output format: OpenAI batch output and error files, or one JSON object per sample. "
            "Example: --format openai-batch",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            show_default=False,
            help="File to write; - is stdout. Default: OUT.openai.jsonl with OUT.openai.errors.jsonl, or OUT.jsonl. "
            "Example: -o batch_output.jsonl",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="Tokenizer of the run if it has moved; needed for logprobs. Example: --tokenizer ./tok",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files. Example: --overwrite")
    ] = False,
) -> None:
    """Write finished results in another format.

    Example: batchgen export results.parquet --format openai-batch
    """
    from batchgen.job.export import ExportFormat, export_results  # imports pyarrow, which is slow

    chosen: ExportFormat = "jsonl" if shape is Format.JSONL else "openai-batch"
    export_results(out, chosen, output, overwrite=overwrite, tokenizer=tokenizer)


EXIT_DIFFERENT = 8
"""Exit code of `verify` if a row differs."""


def _override(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, show_default=False, help=text)


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Finished result file. Example: results.parquet")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Input files of the run if they have moved. Example: prompts.jsonl"),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(
            min=1, metavar="K", show_default=False, help="Number of rows to replay. Default: 10. Example: --rows 50"
        ),
    ] = 10,
    seed: Annotated[
        int,
        typer.Option(metavar="S", show_default=False, help="Seed of the row selection. Default: 0. Example: --seed 7"),
    ] = 0,
    model: Annotated[
        str | None, _override("PATH", "Model of the run if it has moved. Example: --model ./Qwen3-0.6B")
    ] = None,
    tokenizer: Annotated[
        str | None, _override("PATH", "Tokenizer of the run if it has moved. Example: --tokenizer ./tok")
    ] = None,
    lora: Annotated[
        list[str] | None,
        _override("NAME=PATH", "LoRA adapters of the run if they have moved. Example: --lora fr=./french"),
    ] = None,
    logit_processor: Annotated[
        list[str] | None,
        _override(
            "NAME=module:function",
            "Logit processors of the run, which are never read from the output. "
            "Example: --logit-processor calm=mine:calm",
        ),
    ] = None,
    flash_library: Annotated[
        str | None,
        _override(
            "PATH",
            "Library of vllm-flash-attn of the run, which is never read from the output. "
            "Example: --flash-library ./_vllm_fa3_C.abi3.so",
        ),
    ] = None,
    device: Annotated[str | None, _override("auto|cuda|cpu", "Device to run on. Example: --device cpu")] = None,
) -> None:
    """Replay random rows of an output and compare them bitwise.

    Rows are computed one by one, and their tokens and logprobs are compared. Input files and options are read from
    the output. Exit code 0: all rows are equal; 8: some differ.

    Example: batchgen verify results.parquet --rows 20
    """
    from batchgen.job.verify import verify_job  # imports torch, which is slow

    changes = {
        "inputs": inputs,
        "model": model,
        "tokenizer": tokenizer,
        "lora": lora or None,
        "logit_processor": logit_processor or None,
        "flash_library": flash_library,
        "device": device,
    }
    if not verify_job(out, rows, seed, changes):
        raise typer.Exit(EXIT_DIFFERENT)
