"""`batchgen merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchgen.cli.flags import GroupedCommand

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("merge", cls=GroupedCommand, no_args_is_help=True)(merge)


def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PART", help="Shards' files, or folders of them. Example: results.parquet/")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="File to write. Example: -o all.parquet")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT. Example: --overwrite")] = False,
    allow_duplicate_ids: Annotated[
        bool,
        typer.Option(
            "--allow-duplicate-ids",
            help="Join shards that hold rows of one id, each as it is. Example: --allow-duplicate-ids",
        ),
    ] = False,
) -> None:
    """Join the shards of one job into one file, after checking that all are there and belong together.

    Example: batchgen merge results.parquet/ -o all.parquet
    """
    from batchgen.data.merge import merge as merge_shards  # pyarrow: time that `--help` must not pay

    rows = merge_shards(parts, output, overwrite, allow_duplicate_ids=allow_duplicate_ids)
    typer.echo(f"{output}: {rows:,} rows", err=True)
