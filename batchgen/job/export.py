"""`batchgen export`: a finished output in another shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
from batchgen.demo import model_path
from batchgen.errors import ModelError

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
        OutputError: a file exists, or cannot be written.
        ModelError: rows have logprobs, whose tokens' text needs the run's tokenizer, and it cannot be found.
    """
    results = finished_results(out)
    assert results.footer is not None
    path = Path(target) if target else out.with_suffix(".jsonl" if shape == "jsonl" else ".openai.jsonl")
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
