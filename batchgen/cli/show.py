"""`batchgen show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli.flags import GroupedCommand

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("show", cls=GroupedCommand, no_args_is_help=True)(show)


def show(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Result file, folder of shards, or unfinished output. Example: results.parquet"
        ),
    ],
    row: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", show_default=False, help="Print everything about input row N. Example: --row 7"
        ),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="List only rows with an error. Example: --errors")] = False,
    finished: Annotated[
        bool,
        typer.Option(
            "--finished",
            help="Show a finished output also where newer, unfinished work stands over it. Example: --finished",
        ),
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Most samples to list; 0 is all. Default: 20. Example: --limit 100"
        ),
    ] = 20,
) -> None:
    """Read results in a terminal.

    Example: batchgen show results.parquet --errors
    """
    from batchgen.job.show import show_results, show_row  # pyarrow: time that `--help` must not pay

    if row is not None:
        show_row(out, row, finished=finished)
    else:
        show_results(out, errors_only=errors, limit=limit or None, finished=finished)
