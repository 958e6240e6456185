"""`batchgen export`: a finished output as JSON lines, as OpenAI batch output, or as teacher values."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

from batchgen.config.units import STDIN
from batchgen.data.checksums import CrcStream, DamagedBytes
from batchgen.data.durable_files import refuse_existing, write_durably
from batchgen.data.files import followed, is_file, open_named, same_file, size_of, temporary_near
from batchgen.data.lines import errors_path
from batchgen.data.out.distillation import write_kd
from batchgen.data.out.export import ExportCounts, finished_results, write_jsonl, write_openai
from batchgen.data.out.openai_bodies import TokenPiece
from batchgen.data.reserved_paths import ReservedPaths
from batchgen.demo import model_path
from batchgen.errors import ModelError, OutputError, UsageError
from batchgen.request.printable import EscapedJson, printable

ExportFormat = Literal["openai-batch", "jsonl", "kd"]
_SUFFIXES: Final = {"openai-batch": ".openai.jsonl", "jsonl": ".jsonl", "kd": ".kd.parquet"}


def export_results(
    out: Path, shape: ExportFormat, target: str | None, *, overwrite: bool, tokenizer: str | None
) -> None:
    """Write the results of `out` in the format `shape` and print counts to stderr.

    Args:
        out: a finished results file.
        shape: OpenAI's batch output and error files, one object per sample, or the top logprobs.
        target: the file to write, `-` for stdout; None for a name derived from `out`.
        overwrite: whether existing files are replaced.
        tokenizer: folder or id of the tokenizer, if the one recorded in the output is gone.

    Raises:
        InputError: `out` is not a finished output.
        UsageError: a file to write is part of the results or an input of their run.
        OutputError: a file exists, or cannot be written.
        ModelError: rows have logprobs, for which the run's tokenizer is needed, and it cannot be loaded.
    """
    results = finished_results(out)
    run = results.footer
    assert run is not None
    path = Path(target) if target else out.with_suffix(_SUFFIXES[shape])
    files = [path, errors_path(path)] if shape == "openai-batch" else [path]

    def write(streams: Sequence[BinaryIO]) -> ExportCounts:
        if shape == "jsonl":
            return write_jsonl(results, streams[0])
        if shape == "kd":
            return write_kd(results, streams[0])
        return write_openai(results, streams[0], streams[-1], piece_lookup(run, tokenizer))

    if target == STDIN and shape == "kd":
        raise UsageError("--format kd writes Parquet, which does not go to stdout. Name a file with -o.")
    if target == STDIN:
        counts, where = write([cast("BinaryIO", EscapedJson(sys.stdout.buffer))]), ""
    else:
        refuse_overwriting_sources(files, out, run)
        counts, where = write_files(files, write, overwrite), f"{', '.join(map(str, files))}: "
    what = "rows" if shape == "openai-batch" else "samples"
    others = f", {counts.left_out:,} without top logprobs left out" if counts.left_out else ""
    print(printable(f"{where}{counts.lines:,} {what}, {counts.errors:,} failed{others}"), file=sys.stderr)


def write_files(
    files: Sequence[Path],
    write: Callable[[Sequence[BinaryIO]], ExportCounts],
    overwrite: bool,
    temporary: Callable[[Path], Path] = temporary_near,
) -> ExportCounts:
    """Write all files durably, the last one first; none appears under its name if an earlier one fails.

    Args:
        files: their paths.
        write: writes the content of all.
        overwrite: whether existing files are replaced.
        temporary: path of a file -> path of its content until it is complete, on the same file system.

    Raises:
        OutputError: a file exists, cannot be written, or cannot be read back as it was written.
    """
    files = [followed(path) for path in files]
    for path in files:
        refuse_existing(path, overwrite)
    counts: list[ExportCounts] = []

    def write_next(streams: list[BinaryIO]) -> None:
        if len(streams) == len(files):
            counts.append(write(streams))
        else:
            path = files[len(streams)]
            write_durably(path, lambda stream: write_checked(path, streams, stream), temporary(path))

    def write_checked(path: Path, streams: list[BinaryIO], stream: BinaryIO) -> None:
        summed = CrcStream(stream)
        write_next([*streams, cast(BinaryIO, summed)])
        try:
            summed.check()
        except DamagedBytes as problem:
            raise OutputError(
                f"{path} is not written: {problem}. Nothing was replaced. Check the disk and the memory, and run the "
                "same command again."
            ) from problem

    write_next([])
    return counts[0]


def refuse_overwriting_sources(targets: Sequence[Path], out: Path, run: Mapping[str, Any]) -> None:
    """Refuse to overwrite the results or the inputs of their run, even with --overwrite."""
    reserved = ReservedPaths(out)
    for target in targets:
        if target in reserved:
            raise UsageError(f"{target} is part of the results. Name another file with -o.")
        if any(_is_same(target, recorded) for recorded in run["inputs"]):
            raise UsageError(f"{target} is an input of the run. Name another file with -o.")


def _is_same(target: Path, recorded: Mapping[str, Any]) -> bool:
    """Whether `target` is the recorded file: by its name or, since files may have moved, by its content."""
    with suppress(OSError):
        if same_file(target, Path(recorded["path"])):
            return True
    if not is_file(target) or size_of(target) != recorded["size"]:
        return False
    with open_named(target) as stream:
        return bool(hashlib.file_digest(stream, "sha256").hexdigest() == recorded.get("sha256"))


def piece_lookup(run: Mapping[str, Any], named: str | None) -> Callable[[int], TokenPiece]:
    """Token id -> piece. The tokenizer is loaded at the first call: rows without logprobs do not need it."""

    @cache
    def load() -> Any:
        # Imported here: it takes seconds, and an export without logprobs does not need it.
        from batchgen.job.preflight import DEMO
        from batchgen.text.tokens.detokenize import TokenBytes
        from batchgen.text.tokens.tokenizer import Tokenizer

        options = run["configuration"]["options"]
        path = named or options["tokenizer"]["value"] or run["model"]
        revision = options["revision"]["value"] if path == run["model"] else None
        try:
            tokenizer = Tokenizer.load(model_path() if path == DEMO else path, revision)
        except ModelError as error:
            raise ModelError(f"{error}. Rows have logprobs: name the run's tokenizer with --tokenizer.") from None
        if tokenizer.digest != run["tokenizer_digest"]:
            raise ModelError(
                f"the tokenizer of {path} is not the one of the run. Name the run's tokenizer with --tokenizer."
            )
        return TokenBytes(tokenizer), tokenizer.special_ids

    @cache
    def piece(token: int) -> TokenPiece:
        data, special = load()
        return TokenPiece(data[token], token in special)

    return piece
