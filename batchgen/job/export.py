"""`batchgen export`: a finished output in another shape."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from batchgen.data.export import (
    Exported,
    errors_path,
    export_jsonl,
    export_openai,
    finished_results,
    stream_jsonl,
    stream_openai,
)
from batchgen.data.openai_bodies import TokenPiece
from batchgen.data.own import OwnFiles
from batchgen.demo import model_path
from batchgen.errors import ModelError, UsageError

__all__ = ["ExportFormat", "export_results"]

ExportFormat = Literal["openai-batch", "jsonl"]
STDOUT = "-"
DEMO = "demonstration model"


def export_results(
    out: Path, shape: ExportFormat, target: str | None, *, overwrite: bool, tokenizer: str | None
) -> None:
    """Write the results of `out` as `shape` and say on stderr what was written.

    Args:
        out: a finished results file.
        shape: OpenAI's batch output and errors, or one object a sample.
        target: the file to write, `-` for stdout; None is beside `out`.
        overwrite: whether existing files are replaced.
        tokenizer: folder or id of the tokenizer, where the one that the output names is not there any more.

    Raises:
        InputError: there are no finished results.
        UsageError: a file to write is of the results themselves, or an input of their run.
        OutputError: a file exists, or cannot be written.
        ModelError: rows have logprobs, whose tokens' text needs the run's tokenizer, and it cannot be found.
    """
    results = finished_results(out)
    assert results.footer is not None
    path = Path(target) if target else out.with_suffix(".jsonl" if shape == "jsonl" else ".openai.jsonl")
    if target != STDOUT:
        _spare((path,) if shape == "jsonl" else (path, errors_path(path)), out, results.footer)
    if shape == "jsonl":
        stream = sys.stdout.buffer
        done = stream_jsonl(results, stream) if target == STDOUT else export_jsonl(results, path, overwrite)
        _say(done, "samples", None if target == STDOUT else str(path))
        return
    piece = _pieces(results.footer, tokenizer)
    if target == STDOUT:
        _say(stream_openai(results, sys.stdout.buffer, piece), "rows", None)
        return
    done = export_openai(results, path, piece, overwrite)
    _say(done, "rows", f"{path}, {errors_path(path)}")


def _spare(targets: Sequence[Path], out: Path, run: Mapping[str, Any]) -> None:
    """Refuse to write over what cannot be had back from the results, even with --overwrite."""
    own = OwnFiles(out)
    for target in targets:
        if target in own:
            raise UsageError(f"{target} is a file of the results themselves. Name another with -o.")
        if any(_is_same(target, recorded) for recorded in run["inputs"]):
            raise UsageError(f"{target} is an input of the run. Name another file with -o.")


def _is_same(target: Path, recorded: Mapping[str, Any]) -> bool:
    """Whether it is the recorded file: by its name, or, since either may have moved, by what it holds."""
    with suppress(OSError):
        if target.samefile(recorded["path"]):
            return True
    if not target.is_file() or target.stat().st_size != recorded["size"]:
        return False
    with target.open("rb") as stream:
        return bool(hashlib.file_digest(stream, "sha256").hexdigest() == recorded["sha256"])


def _say(done: Exported, what: str, where: str | None) -> None:
    print(f"{f'{where}: ' if where else ''}{done.lines:,} {what}, {done.errors:,} failed", file=sys.stderr)


def _pieces(run: Mapping[str, Any], named: str | None) -> Callable[[int], TokenPiece]:
    """Id -> piece. The tokenizer is loaded at the first token: rows without logprobs need none."""

    @cache
    def load() -> Any:
        # Imported here: it takes seconds, which an export without logprobs must not pay.
        from batchgen.text.token_bytes import TokenBytes
        from batchgen.text.tokenizer import Tokenizer

        options = run["configuration"]["options"]
        path = named or options["tokenizer"]["value"] or run["model"]
        try:
            tokenizer = Tokenizer.load(model_path() if path == DEMO else path, options["revision"]["value"])
        except ModelError as error:
            raise ModelError(f"{error}. Name the run's tokenizer with --tokenizer: rows have logprobs.") from None
        if tokenizer.digest != run["tokenizer_digest"]:
            raise ModelError(f"the tokenizer of {path} is not the run's. Name that with --tokenizer.")
        return TokenBytes(tokenizer), tokenizer.special_ids

    @cache
    def piece(token: int) -> TokenPiece:
        data, special = load()
        return TokenPiece(data[token], token in special)

    return piece
