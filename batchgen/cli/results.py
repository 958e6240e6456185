"""The commands `show`, `report`, `merge`, `export` and `verify`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from batchgen.cli.flags import gather, option_parameters
from batchgen.cli.grouped_command import GroupedCommand
from batchgen.config.run_config import BY_NAME
from batchgen.config.units import STDIN, check_file_to_write
from batchgen.config.urls import check_stored, path_of
from batchgen.errors import UsageError
from batchgen.request.printable import printable

EXIT_DIFFERENT = 8
"""Exit code of `verify` if a row differs, or a file is damaged."""


def _stored(text: str, check: Callable[[str], str] = check_stored) -> Path:
    try:
        return path_of(check(text))
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None


def _file_to_write(text: str) -> Path:
    return _stored(text, check_file_to_write)


def _name_to_write(text: str) -> str:
    return text if text == STDIN else str(_file_to_write(text))


def _argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, parser=_stored)


def _option(
    metavar: str, text: str, *names: str, least: int | None = None, parser: Callable[[str], str] | None = None
) -> Any:
    return typer.Option(*names, metavar=metavar, min=least, show_default=False, help=text, parser=parser)


def _switch(name: str, text: str) -> Any:
    return typer.Option(name, help=text)


Results: TypeAlias = Annotated[
    Path, _argument("OUT", "Result file, folder of shards, or unfinished output. Example: results.parquet")
]
Finished: TypeAlias = Annotated[Path, _argument("OUT", "Finished result file. Example: results.parquet")]
Shards: TypeAlias = Annotated[
    list[Path], _argument("PART", "Result files of the shards, or folders of them. Example: results.parquet/")
]
Row: TypeAlias = Annotated[int | None, _option("N", "Print all columns of input row N. Example: --row 7", least=0)]
Errors: TypeAlias = Annotated[bool, _switch("--errors", "List only rows with an error. Example: --errors")]
ShowFinished: TypeAlias = Annotated[
    bool,
    _switch("--finished", "Show the finished output even if newer unfinished work exists. Example: --finished"),
]
Limit: TypeAlias = Annotated[
    int | None,
    _option("N", "Most samples to list; 0 is all. Default: 20, and all with --follow. Example: --limit 100", least=0),
]
Columns: TypeAlias = Annotated[
    str | None,
    _option(
        "COL,...",
        "Columns to list in place of the text, or parts of them. Example: --columns id,error.code,completion_tokens",
    ),
]
Where: TypeAlias = Annotated[
    list[str] | None,
    _option(
        "COL=VALUE",
        "List only samples whose column is so; also != < <= > >=, ~ (contains) and the value null; repeatable. "
        "Example: --where finish_reason=length",
    ),
]
Follow: TypeAlias = Annotated[
    bool,
    _switch("--follow", "List the samples of a running job as they are committed, until it ends. Example: --follow"),
]
NoPager: TypeAlias = Annotated[
    bool, _switch("--no-pager", "Write longer text to the terminal without $PAGER or less. Example: --no-pager")
]
Merged: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="PATH", parser=_file_to_write, help="File to write. Example: -o all.parquet"
    ),
]
Overwrite: TypeAlias = Annotated[bool, _switch("--overwrite", "Replace an existing output file. Example: --overwrite")]
OverwriteFiles: TypeAlias = Annotated[bool, _switch("--overwrite", "Replace existing files. Example: --overwrite")]
DuplicateIds: TypeAlias = Annotated[
    bool,
    _switch("--allow-duplicate-ids", "Allow rows with the same id in different shards. Example: --allow-duplicate-ids"),
]
Shape: TypeAlias = Annotated[
    Literal["openai-batch", "jsonl", "kd"],
    typer.Option(
        "--format",
        metavar="openai-batch|jsonl|kd",
        help="Output format: OpenAI batch output and error files, one JSON object per sample, or Parquet of the top "
        "logprobs for distillation. "
        "Example: --format openai-batch",
    ),
]
Exported: TypeAlias = Annotated[
    str | None,
    _option(
        "PATH",
        "File to write; - is stdout. Default: OUT.openai.jsonl with OUT.openai.errors.jsonl, OUT.jsonl, or "
        "OUT.kd.parquet. Example: -o batch_output.jsonl",
        "--output",
        "-o",
        parser=_name_to_write,
    ),
]
Page: TypeAlias = Annotated[
    str | None,
    _option(
        "PATH",
        "File to write; - is stdout. Default: OUT with the suffix .html. Example: -o report.html",
        "--output",
        "-o",
        parser=_name_to_write,
    ),
]
MovedTokenizer: TypeAlias = Annotated[
    str | None,
    _option("PATH", "Tokenizer of the run if it has moved; needed for logprobs. Example: --tokenizer ./tok"),
]
Inputs: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="INPUT", help="Input files of the run if they have moved. Example: prompts.jsonl"),
]
CheckFile: TypeAlias = Annotated[
    bool,
    _switch(
        "--file",
        "Check the file itself, without computing: checksums of every byte, keys, counts. Also a work folder, or JSON "
        "lines. Example: --file",
    ),
]
Rows: TypeAlias = Annotated[int, _option("K", "Number of rows to replay. Default: 10. Example: --rows 50", least=1)]
Seed: TypeAlias = Annotated[int, _option("S", "Seed of the row selection. Default: 0. Example: --seed 7")]

REPLACED = {
    "model": "Model of the run if it has moved. Example: --model ./Qwen3-0.6B",
    "tokenizer": "Tokenizer of the run if it has moved. Example: --tokenizer ./tok",
    "lora": "LoRA adapters of the run if they have moved. Example: --lora fr=./french",
    "logit_processor": "Logit processors of the run, which are never read from the output. "
    "Example: --logit-processor calm=mine:calm",
    "flash_library": "Library of vllm-flash-attn of the run, which is never read from the output. "
    "Example: --flash-library ./_vllm_fa3_C.abi3.so",
    "device": "Device to run on. Example: --device cpu",
}
"""Options of the run that `verify` can replace -> their help text there."""


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    options = [replace(BY_NAME[name], help=text, default=None, group="Options") for name, text in REPLACED.items()]
    replaced = {parameter.name: parameter.annotation for parameter in option_parameters(tuple(options))}
    for name, command in (
        ("show", show),
        ("report", report),
        ("merge", merge),
        ("export", export),
        ("verify", gather(verify, "changes", replaced)),
    ):
        app.command(name, cls=GroupedCommand, no_args_is_help=True)(command)


def show(
    out: Results,
    row: Row = None,
    errors: Errors = False,
    where: Where = None,
    columns: Columns = None,
    follow: Follow = False,
    finished: ShowFinished = False,
    limit: Limit = None,
    no_pager: NoPager = False,
) -> None:
    """Print results in the terminal.

    Example: batchgen show results.parquet --errors
    """
    from batchgen.job.results.show import Listed, follow_results, show_results, show_row  # imports pyarrow: slow

    if (follow and finished) or (row is not None and (follow or where)):
        raise UsageError("--row shows one row, and --finished a job that has ended: leave --follow and --where out")
    listed = Listed.of(errors, where or (), columns, limit if limit is not None or follow else 20)
    if row is not None:
        show_row(out, row, columns=listed.columns, finished=finished, pager=not no_pager)
    elif follow:
        follow_results(out, listed)
    else:
        show_results(out, listed, finished=finished, pager=not no_pager)


def report(
    out: Results,
    inputs: Inputs = None,
    output: Page = None,
    tokenizer: MovedTokenizer = None,
    overwrite: Overwrite = False,
) -> None:
    """Write one HTML page that shows a job: speed, lengths, errors, prompts and answers.

    The page needs no network. Prompts are read from the run's input files, if they are still there.

    Example: batchgen report results.parquet
    """
    from batchgen.job.results.report import write_page  # imports pyarrow, which is slow

    write_page(out, output, inputs=inputs, tokenizer=tokenizer, overwrite=overwrite)


def merge(
    parts: Shards, output: Merged, overwrite: Overwrite = False, allow_duplicate_ids: DuplicateIds = False
) -> None:
    """Merge the shards of one job into one file.

    Checks first that they are complete and belong together.

    Example: batchgen merge results.parquet/ -o all.parquet
    """
    from batchgen.data.out.merge import merge as merge_shards  # imports pyarrow, which is slow

    rows = merge_shards(parts, output, overwrite, allow_duplicate_ids=allow_duplicate_ids)
    print(printable(f"{output}: {rows:,} rows"), file=sys.stderr)


def export(
    out: Finished,
    shape: Shape,
    output: Exported = None,
    tokenizer: MovedTokenizer = None,
    overwrite: OverwriteFiles = False,
) -> None:
    """Write finished results in another format.

    Example: batchgen export results.parquet --format openai-batch
    """
    from batchgen.job.results.export import export_results  # imports pyarrow, which is slow

    export_results(out, shape, output, overwrite=overwrite, tokenizer=tokenizer)


def verify(
    out: Finished,
    inputs: Inputs = None,
    rows: Rows = 10,
    seed: Seed = 0,
    file: CheckFile = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Replay random rows of an output and compare them bitwise.

    Rows are computed one by one, and their tokens and logprobs are compared. Input files and options are read from
    the output. With --file nothing is computed: the file itself is checked. Exit code 0: all rows are equal, or the
    file is intact; 8: some differ, or it is damaged.

    Example: batchgen verify results.parquet --rows 20
    """
    if file:
        from batchgen.data.out.file_check import verify_files  # imports pyarrow, which is slow

        if not verify_files(out):
            raise typer.Exit(EXIT_DIFFERENT)
        return
    from batchgen.job.results.verify import verify_job  # imports torch, which is slow

    if not verify_job(out, rows, seed, {"inputs": inputs, **{k: None if v == [] else v for k, v in changes.items()}}):
        raise typer.Exit(EXIT_DIFFERENT)
