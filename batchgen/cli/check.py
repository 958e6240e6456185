"""`batchgen check`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchgen.cli.flags import GroupedCommand, with_options
from batchgen.config import RunConfig

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("check", cls=GroupedCommand, no_args_is_help=True)(with_options(check))


def check(
    config: RunConfig,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout. Example: --json")] = False,
) -> None:
    """Check an input without running it: every row, the plan, its costs. Takes the options of `run`.

    Example: batchgen check prompts.jsonl --model ./Qwen3-0.6B
    """
    from batchgen.job.preflight import refuse_early

    refuse_early(config)
    from batchgen.job.check import check_job  # torch and the tokenizer: seconds that `--help` must not pay

    raise typer.Exit(check_job(config, as_json=as_json))
