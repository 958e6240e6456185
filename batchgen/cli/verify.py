"""`batchgen verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.cli.flags import GroupedCommand

__all__ = ["DIFFERENT", "register"]

DIFFERENT = 8
"""Exit code when a row differs."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("verify", cls=GroupedCommand, no_args_is_help=True)(verify)


def _moved(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, show_default=False, help=text)


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Finished result file. Example: results.parquet")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="The run's input files, where they have moved. Example: prompts.jsonl"),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=1, metavar="K", show_default=False, help="Rows to replay. Default: 10. Example: --rows 50"),
    ] = 10,
    seed: Annotated[
        int, typer.Option(metavar="S", show_default=False, help="Chooses the rows. Default: 0. Example: --seed 7")
    ] = 0,
    model: Annotated[
        str | None, _moved("PATH", "The run's model, where it has moved. Example: --model ./Qwen3-0.6B")
    ] = None,
    tokenizer: Annotated[
        str | None, _moved("PATH", "The run's tokenizer, where it has moved. Example: --tokenizer ./tok")
    ] = None,
    lora: Annotated[
        list[str] | None, _moved("NAME=PATH", "The run's adapters, where they have moved. Example: --lora fr=./french")
    ] = None,
    logit_processor: Annotated[
        list[str] | None,
        _moved(
            "NAME=module:function",
            "The run's logit processors; the output cannot name code. Example: --logit-processor calm=mine:calm",
        ),
    ] = None,
    flash_library: Annotated[
        str | None,
        _moved(
            "PATH",
            "The run's library of vllm-flash-attn; the output cannot name code. "
            "Example: --flash-library ./_vllm_fa3_C.abi3.so",
        ),
    ] = None,
    device: Annotated[str | None, _moved("auto|cuda|cpu", "Where to compute. Example: --device cpu")] = None,
) -> None:
    """Replay random rows of a finished output, each alone, and compare tokens and logprobs bit by bit.

    Input files and options are those that the output records. Exit code 0: all rows are the same; 8: some differ.

    Example: batchgen verify results.parquet --rows 20
    """
    from batchgen.job.verify import verify_job  # torch and transformers: seconds that `--help` must not pay

    moved = {"model": model, "tokenizer": tokenizer, "lora": lora or None, "logit_processor": logit_processor or None}
    changes = {"inputs": inputs, **moved, "flash_library": flash_library, "device": device}
    if not verify_job(out, rows, seed, changes):
        raise typer.Exit(DIFFERENT)
