"""The `batchgen` command: its subcommands, and how errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO, cast

import typer
from typer.main import get_command

from batchgen import __version__
from batchgen.cli import help, jobs, machine, results
from batchgen.cli.flags import translated
from batchgen.config.urls import is_url
from batchgen.errors import BatchgenError, DeviceError, Interrupted, OutputError, UsageError, is_out_of_host_memory
from batchgen.request.printable import EscapedText, printable

_CommandLineError = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""ClickException of the copy of click that typer contains."""

_COMPLETION = "_BATCHGEN_COMPLETE"
"""Environment variable that a shell sets to request completions."""
_SIGINT_STATUS = 130
_SIGPIPE_STATUS = 141
"""Exit code of a program that SIGPIPE ends."""

app = typer.Typer(
    name="batchgen",
    no_args_is_help=True,
    rich_markup_mode=None,  # its boxes truncate option names in narrow terminals
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for commands in (jobs, results, machine, help):
    commands.register(app)


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
    status = run_command(sys.argv[1:])
    try:
        sys.stderr.flush()
    except OSError:  # otherwise the interpreter, which flushes it at exit, would end with another code
        _discard(sys.stderr)
    sys.exit(status)


def _replace_closed_streams() -> None:
    """Replace standard streams that the caller closed (`2>&-`), which are None in Python.

    Text to a closed stderr is discarded; writing to a closed stdout fails with an error.
    """
    for name, flags in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), "w", encoding="utf-8", errors="backslashreplace"))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors become one line on stderr.

    Both standard streams escape what is written to them, and messages that cannot be written are dropped.
    """
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", EscapedText(stdout, lasting=False))
    sys.stderr = cast("TextIO", EscapedText(stderr, lasting=True))
    try:
        return _run_reported(arguments)
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _run_reported(arguments: Sequence[str]) -> int:
    try:
        return _invoke(arguments)
    except KeyboardInterrupt:
        _print_error("interrupted")
        return _SIGINT_STATUS
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Report an error and return the exit code that it is."""
    if isinstance(error, _CommandLineError):
        return _report_usage_error(error)
    if is_out_of_host_memory(error) and not isinstance(error, DeviceError | Interrupted | OutputError):
        _print_error(
            "the process has no memory left. Give it more, or lower --kv-memory or --max-num-seqs, and run the same "
            "command again: committed rows are kept."
        )
        return OutputError.exit_code
    if isinstance(error, BatchgenError):
        _print_error(str(error))
        return error.exit_status if isinstance(error, Interrupted) else error.exit_code
    if isinstance(error, BrokenPipeError):
        _discard(sys.stdout)
        return _SIGPIPE_STATUS
    return _report_os_error(error) if isinstance(error, OSError) else _report_internal_error(error)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter does not fail to flush its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report_os_error(error: OSError) -> int:
    """Report an error of the operating system about a file. Without a file name, a full disk is that of stdout."""
    if error.errno is None:
        return _report_internal_error(error)
    reason = os.strerror(error.errno)
    if is_url(str(error.filename)):
        _print_error(f"{error.filename} cannot be used ({error.strerror}).")
        return OutputError.exit_code
    if error.errno == errno.ENAMETOOLONG:  # of a path that is put together
        _print_error(f"{str(error.filename)[:80]}...: the name is too long; shorten it")
        return UsageError.exit_code
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EBADF):
        _discard(sys.stdout)
        _print_error(f"stdout cannot be written ({reason.lower()})")
    else:
        name = "a file" if error.filename is None else os.fsdecode(error.filename)
        _print_error(
            f"{name} cannot be used ({reason}). Check its disk and run the same command again: committed rows are kept."
        )
    return OutputError.exit_code


def _invoke(arguments: Sequence[str]) -> int:
    """Run a command like typer's `main`, without its handling of errors, interrupts and broken pipes."""
    command = get_command(app)
    status = 0
    words, notes = translated(arguments)
    for line in notes:
        print(line, file=sys.stderr)
    try:
        with command.make_context("batchgen", words) as context:
            command.invoke(context)
    except typer.Exit as done:
        status = done.exit_code
    sys.stdout.flush()
    return status


def _print_error(message: str) -> None:
    """Print one error with control characters escaped, because it may quote a row, a file name or a library.

    Lines after the first are indented, so that what is quoted cannot pass for another message.
    """
    shown = "\n  ".join(map(printable, message.split("\n")))
    print(f"error: {shown}", file=sys.stderr, flush=True)


def _report_usage_error(error: Exception) -> int:
    """Report an error of typer on one line with a hint at `--help`; without arguments, print the help."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        if message:
            print(message, file=sys.stderr)
    else:
        context = getattr(error, "ctx", None)
        line = " ".join(message.split()).rstrip(".")  # choices come with line ends and tabs
        _print_error(f"{line} (see {context.command_path if context else 'batchgen'} --help)")
    return 2


def _report_internal_error(error: Exception) -> int:
    """Report the type and place of an unexpected error, without its message, which may quote a prompt."""
    if os.environ.get("BATCHGEN_TRACEBACK") == "1":
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    _print_error(f"internal error, {type(error).__name__}{place}; BATCHGEN_TRACEBACK=1 prints the traceback")
    return 1
