"""The help of a command: what people use, all of its options by group, or those about a word."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

import typer
from typer.core import TyperCommand

from batchgen.config.run_config import GROUPS
from batchgen.errors import UsageError
from batchgen.job.display.pager import paged

_ALL: Final = "all"
_SHORT: Final = "Common options"
"""Title of the list of the short help."""
_WORD: Final = "batchgen.help"
"""Key of the word after `--help` in a context."""
_COMMON: Final = frozenset({
    "inputs", "prompt_column", "prompt_template", "chat", "system", "limit", "shard", "output", "model", "device",
    "config", "replicas", "existing_overwrite", "retry_errors", "max_errors", "max_time", "temperature",
    "max_new_tokens", "n", "stop", "json_schema", "return_logprob", "seed", "as_json",
    "machine", "devices", "output_tokens",
})  # fmt: skip
"""Parameters of commands with many options that the short help lists."""
_EXAMPLES: Final = {
    "run": (
        "batchgen run prompts.jsonl --model ./Qwen3-0.6B -o results.parquet",
        "batchgen run faq.csv --prompt-column question --chat --limit 10",
        "batchgen run prompts.jsonl --temperature 0 --max-new-tokens 64 --max-time 2h",
    ),
    "check": (
        "batchgen check prompts.jsonl --model ./Qwen3-0.6B",
        "batchgen check faq.csv --prompt-column question --chat --json",
    ),
    "plan": (
        "batchgen plan prompts.jsonl --model ./Qwen3-0.6B --machine h100.toml",
        "batchgen plan prompts.jsonl --machine pilot.json --devices 1,8 --json",
    ),
}
"""Command with many options -> examples in its short help."""


class GroupedCommand(TyperCommand):
    """Command whose help lists the options by group and never truncates them.

    `--help` is followed by nothing, `all` or a word. Of a command with many options, nothing means the common ones.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the word after `--help` is kept for the help."""
        asked = next((place for place, word in enumerate(args) if word in ctx.help_option_names), len(args))
        word = next(iter(args[asked + 1 :]), "")
        ctx.meta[_WORD] = "" if word.startswith("-") else word
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, which shows long help in a pager."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = "Show the options: all, or those about a word. Example: --help all"
            option.callback = _show_help
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, or only the options that a word is about."""
        if ctx.meta.get(_WORD) in ("", _ALL, None):
            super().format_help(ctx, formatter)
        else:
            self.format_options(ctx, formatter)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does; its example is among those of the short help."""
        if _is_short(self, ctx):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(inspect.cleandoc(self.help or "").partition("\n\nExample:")[0])
        else:
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the options of each group.

        Raises:
            UsageError: no option is about the word.
        """
        word = ctx.meta.get(_WORD) or ""
        examples = _EXAMPLES[str(self.name)] if _is_short(self, ctx) else ()
        if examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in examples))
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS, _SHORT, "Options")}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or (examples and parameter.name not in _COMMON):
                continue
            if word not in ("", _ALL) and word.lower().lstrip("-") not in " ".join(record).lower():
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = _SHORT if examples else getattr(parameter, "rich_help_panel", None) or kind
            spelled, _, _ = record[0].partition(" <")  # the type that follows the name of an argument
            panels[panel].append((spelled.partition(" / ")[0], _short(record[1])) if examples else (spelled, record[1]))
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if word not in ("", _ALL) and not any(panels.values()):
            raise UsageError(
                f"no option of `{ctx.command_path}` has `{word}` in its name or its help; `batchgen help {word}` "
                "searches the pages"
            )
        if examples:
            formatter.write_paragraph()
            formatter.write(
                f"All options: {ctx.command_path} --help all\n"
                f"Options about a word, such as `cache`: {ctx.command_path} --help cache\n"
                "Documentation: batchgen help; first steps: batchgen help install\n"
            )


def _is_short(command: TyperCommand, ctx: Any) -> bool:
    return command.name in _EXAMPLES and not ctx.meta.get(_WORD)


def _short(text: str) -> str:
    """The first clause of a help text."""
    return text.partition(" Example: ")[0].partition(". ")[0].partition("; ")[0].rstrip(".")


def _show_help(ctx: Any, _: object, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    text = ctx.get_help()
    if ctx.meta.get(_WORD) and sys.stdout.isatty():
        paged(text + "\n")
    else:
        typer.echo(text)
    raise typer.Exit
