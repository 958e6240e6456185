"""The `batchgen` command: its subcommands, and how errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, cast

import typer
from typer.main import get_command

from batchgen import __version__
from batchgen.cli import bench, check, export, merge, run, show, verify
from batchgen.errors import BatchgenError, Interrupted, OutputError
from batchgen.printable import printable

__all__ = ["app", "command_names", "main", "run_command"]

_CommandLineError = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""click's ClickException, from the copy of click that typer has."""

_COMPLETION = "_BATCHGEN_COMPLETE"
"""Set by a shell that asks for completions."""
_INTERRUPTED = 130
_READER_GONE = 141
"""What a program ended by SIGPIPE returns."""

app = typer.Typer(
    name="batchgen",
    no_args_is_help=True,
    rich_markup_mode=None,  # its boxes cut option names off in narrow terminals
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, check, show, merge, export, verify, bench):
    command.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Offline batch generation for large language models: files of prompts in, Parquet of results out."""


def main() -> None:
    """Entry point of the console script."""
    if _COMPLETION in os.environ:
        app(prog_name="batchgen")
    _replace_closed_streams()
    sys.exit(run_command(sys.argv[1:]))


def _replace_closed_streams() -> None:
    """What was closed by who started the program (`2>&-`) is None in Python, its number free for other files.

    Words for stderr go nowhere then; stdout cannot be written, which is said where it is needed.
    """
    for name, flags in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), "w", encoding="utf-8", errors="backslashreplace"))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors become one line on stderr."""
    try:
        return _invoke(arguments)
    except _CommandLineError as error:
        return _say_usage(error)
    except Interrupted as error:
        _say(str(error))
        return error.exit_status
    except BatchgenError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _READER_GONE
    except OSError as error:
        return _say_unwritten(error)
    except Exception as error:
        return _say_internal(error)


def _drop_stdout() -> None:
    """What is left in its buffer can go nowhere; the interpreter must not try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_unwritten(error: OSError) -> int:
    """Errors of writing to stdout name no file, and those of results were put in words; other errors are internal."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
        return _say_internal(error)
    _drop_stdout()
    _say(f"stdout cannot be written ({os.strerror(error.errno).lower()})")
    return OutputError.exit_code


def _invoke(arguments: Sequence[str]) -> int:
    """What typer's own `main` does, less its handling of errors, interrupts and broken pipes."""
    command = get_command(app)
    status = 0
    try:
        with command.make_context("batchgen", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        status = done.exit_code
    sys.stdout.flush()
    return status


def command_names() -> list[str]:
    """The subcommands, in the order of the help."""
    return [str(info.name) for info in app.registered_commands]


def _say(message: str) -> None:
    """A message may quote a row, a file's name or what a library says: none of them may steer the terminal."""
    shown = printable(message, keep="\n")
    with suppress(OSError):
        print(f"error: {shown}", file=sys.stderr, flush=True)


def _say_usage(error: Exception) -> int:
    """One line for what typer found wrong with the command line, and where to read on; help where nothing was given."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:
            print(message, file=sys.stderr)
    else:
        context = getattr(error, "ctx", None)
        _say(f"{message.rstrip('.')} (see {context.command_path if context else 'batchgen'} --help)")
    return 2


def _say_internal(error: Exception) -> int:
    """Where it happened, without the message: that may quote a prompt, and prompts are never logged."""
    if os.environ.get("BATCHGEN_TRACEBACK") == "1":
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    _say(f"internal error, {type(error).__name__}{place}; BATCHGEN_TRACEBACK=1 prints the traceback")
    return 1
