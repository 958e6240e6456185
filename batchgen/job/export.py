"""`batchgen export`: a finished output as JSON lines or as OpenAI batch output."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from batchgen.data.export import (
    ExportCounts,
    errors_path,
    export_jsonl,
    export_openai,
    finished_results,
    stream_jsonl,
    stream_openai,
)
from batchgen.data.openai_bodies import TokenPiece
from batchgen.data.read.reserved_paths import ReservedPaths
from batchgen.demo import model_path
from batchgen.errors import ModelError, UsageError

__all__ = ["ExportFormat", "export_results"]

ExportFormat = Literal["openai-batch", "jsonl"]
STDOUT = "-"
DEMO = "demonstration model"


def export_results(
    out: Path, shape: ExportFormat, target: str | None, *, overwrite: bool, tokenizer: str | None
) -> None:
    """Write the results of `out` in the format `shape` and print counts to stderr.

    Args:
        out: a finished results file.
        shape: OpenAI's batch output and error files, or one object per sample.
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
    assert results.footer is not None
    path = Path(target) if target else out.with_suffix(".jsonl" if shape == "jsonl" else ".openai.jsonl")
    if target != STDOUT:
        _refuse_overwriting_sources((path,) if shape == "jsonl" else (path, errors_path(path)), out, results.footer)
    if shape == "jsonl":
        stream = sys.stdout.buffer
        counts = stream_jsonl(results, stream) if target == STDOUT else export_jsonl(results, path, overwrite)
        _print_counts(counts, "samples", None if target == STDOUT else str(path))
        return
    piece = _piece_lookup(results.footer, tokenizer)
    if target == STDOUT:
        _print_counts(stream_openai(results, sys.stdout.buffer, piece), "rows", None)
        return
    counts = export_openai(results, path, piece, overwrite)
    _print_counts(counts, "rows", f"{path}, {errors_path(path)}")


def _refuse_overwriting_sources(targets: Sequence[Path], out: Path, run: Mapping[str, Any]) -> None:
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
        if target.samefile(recorded["path"]):
            return True
    if not target.is_file() or target.stat().st_size != recorded["size"]:
        return False
    with target.open("rb") as stream:
        return bool(hashlib.file_digest(stream, "sha256").hexdigest() == recorded["sha256"])


def _print_counts(counts: ExportCounts, what: str, where: str | None) -> None:
    print(f"{f'{where}: ' if where else ''}{counts.lines:,} {what}, {counts.errors:,} failed", file=sys.stderr)


def _piece_lookup(run: Mapping[str, Any], named: str | None) -> Callable[[int], TokenPiece]:
    """Token id -> piece. The tokenizer is loaded at the first call: rows without logprobs do not need it."""

    @cache
    def load() -> Any:
        # Imported here: it takes seconds, and an export without logprobs does not need it.
        from batchgen.text.token_bytes import TokenBytes
        from batchgen.text.tokenizer import Tokenizer

        options = run["configuration"]["options"]
        path = named or options["tokenizer"]["value"] or run["model"]
        try:
            tokenizer = Tokenizer.load(model_path() if path == DEMO else path, options["revision"]["value"])
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
