"""Results in the shape of OpenAI's batch output: `text_completion` and `chat.completion` bodies, and error lines.

Pure: rows of a results file in, JSON-ready values out. What those endpoints have no word for is mapped to the nearest
one and said in the README.
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.data.row_shapes import RowShape
from batchgen.errors import ErrorCode

__all__ = ["TokenPiece", "batch_line"]

Row = Mapping[str, Any]

NEVER = -9999.0
"""What the endpoints say for a token that cannot be drawn; JSON has no minus infinity."""

_SERVER_ERRORS = frozenset(
    {ErrorCode.OOM, ErrorCode.NAN_LOGITS, ErrorCode.ENGINE_CRASH, ErrorCode.INTERNAL, ErrorCode.PROCESSOR_ERROR}
)
"""The request was sound; everything else is status 400."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token as it stands in a text."""

    data: bytes
    """Its part of the text, which may be part of a character only."""
    special: bool

    @property
    def text(self) -> str | None:
        """Its text; None where its bytes are no whole characters."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


Pieces = Callable[[int], TokenPiece]


def batch_line(rows: Sequence[Row], shape: RowShape, run: Mapping[str, Any], piece: Pieces) -> tuple[bool, Any]:
    """One input row's line, and whether it belongs in the output file (else: in the errors file).

    Args:
        rows: all output rows of one input row, in order.
        shape: what the input row was.
        run: the output's footer.
        piece: id -> its piece; called only for rows with logprobs.
    """
    first = rows[0]
    key = f"{run['fingerprint']}\n{first['row_index']}"
    digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    failed = next((row["error"] for row in rows if row["error"] is not None), None)
    if failed is None:
        status, body = 200, _body(rows, shape, run, piece, digest)
    else:
        status, body = _error(failed)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return failed is None, {
        "id": f"batch_req_{digest}",
        "custom_id": first["id"],
        "response": response,
        "error": None,
    }


def _error(error: Mapping[str, Any]) -> tuple[int, Any]:
    ours = error["code"] in _SERVER_ERRORS
    kind = "server_error" if ours else "invalid_request_error"
    found = {"message": error["message"], "type": kind, "param": error["param"], "code": error["code"]}
    return 500 if ours else 400, {"error": found}


def _body(rows: Sequence[Row], shape: RowShape, run: Mapping[str, Any], piece: Pieces, digest: str) -> Any:
    choice = _chat_choice if shape.chat else _completion_choice
    return {
        "id": f"{'chatcmpl' if shape.chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if shape.chat else "text_completion",
        "created": run.get("created", 0),
        "model": _model_name(run),
        "choices": [
            {
                "index": index,
                **choice(row, shape, piece),
                "finish_reason": _finish_reason(row),
                "stop_reason": _stop_reason(row),
                **({} if row["scores"] is None else {"scores": row["scores"], "score_logprobs": _scored(row)}),
            }
            for index, row in enumerate(rows)
        ],
        "usage": _usage(rows),
        "system_fingerprint": f"fp_{run['fingerprint'][:12]}",
    }


def _model_name(run: Mapping[str, Any]) -> str:
    """The model's id, or its folder's name: other people's responses need no paths of this machine."""
    name = str(run["model"])
    return name.rstrip("/").rpartition("/")[2] if name.startswith((".", "/", "~")) else name


def _finish_reason(row: Row) -> Literal["stop", "length"]:
    """`repetition` and `abort` cut a row short, as a limit does; `stop_reason` says which it was."""
    return "stop" if row["finish_reason"] == "stop" else "length"


def _scored(row: Row) -> list[float]:
    """The scored texts' token logprobs, flat: a scoring row has no word in those endpoints, so its columns stand."""
    return [_finite(logprob) for logprob in row["score_logprobs"]]


def _stop_reason(row: Row) -> str | None:
    """What made the row stop, where `finish_reason` does not say it; servers have the same extension."""
    if row["finish_reason"] in ("repetition", "abort"):
        return str(row["finish_reason"])
    return None if row["stop_kind"] == "eos" else row["matched_stop"]


def _usage(rows: Sequence[Row]) -> dict[str, Any]:
    """A prompt counts once, however many samples it has; samples that `best_of` dropped count as generated."""
    prompts = [row for row in rows if row["sample_index"] == 0]
    prompt_tokens = sum(row["prompt_tokens"] for row in prompts)
    completion_tokens = sum(row["completion_tokens"] + (row["dropped_tokens"] or 0) for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(row["cached_tokens"] or 0 for row in prompts)},
    }


def _chat_choice(row: Row, shape: RowShape, piece: Pieces) -> dict[str, Any]:
    found = None
    if row["output_logprobs"] is not None:
        content = [_chat_token(token, logprob, top, piece) for token, logprob, top in _tokens(row, "output")]
        found = {"content": content, "refusal": None}
    return {"message": {"role": "assistant", "content": row["text"] or "", "refusal": None}, "logprobs": found}


def _chat_token(token: int, logprob: float, top: _Top, piece: Pieces) -> dict[str, Any]:
    return {**_chat_piece(token, logprob, piece), "top_logprobs": [_chat_piece(*pair, piece) for pair in top or ()]}


def _chat_piece(token: int, logprob: float, piece: Pieces) -> dict[str, Any]:
    found = piece(token)
    text = found.text
    return {
        "token": _escaped(found.data) if text is None else text,
        "logprob": _finite(logprob),
        "bytes": list(found.data),
    }


def _completion_choice(row: Row, shape: RowShape, piece: Pieces) -> dict[str, Any]:
    text = row["text"] or ""
    if row["output_logprobs"] is None:
        return {"text": text, "logprobs": None}
    found = [*_prompt_tokens(row), *_tokens(row, "output")] if shape.echo else list(_tokens(row, "output"))
    pieces = [piece(token) for token, _, _ in found]
    # What the text begins with, of which no logprob was asked for.
    before = [piece(token) for token in _silent_ids(row)] if shape.echo else []
    asked = bool(row["output_top_ids"] or row["input_top_ids"])
    logprobs = {
        "tokens": [_completion_token(item) for item in pieces],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in found],
        "top_logprobs": [_alternatives(*token, piece=piece) for token in found] if asked else None,
        "text_offset": _text_offsets(text, [*before, *pieces])[len(before) :],
    }
    return {"text": text, "logprobs": logprobs}


_Top = Sequence[tuple[int, float]] | None


def _tokens(row: Row, side: Literal["input", "output"], ids: Sequence[int] | None = None) -> Iterator[Any]:
    """(id, logprob, its alternatives as (id, logprob) or None) of each token of one side."""
    ids = row["output_ids"] if ids is None else ids
    logprobs = row[f"{side}_logprobs"] or ()
    top_ids, top_logprobs = row[f"{side}_top_ids"], row[f"{side}_top_logprobs"]
    k = len(top_ids) // len(ids) if top_ids else 0
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        span = slice(place * k, (place + 1) * k)
        top = None
        if k and top_ids[span][0] is not None:
            top = list(zip(top_ids[span], top_logprobs[span], strict=True))
        yield token, logprob, top


def _prompt_tokens(row: Row) -> Iterator[Any]:
    """The echoed prompt's tokens, as far as the row has their ids and logprobs."""
    if row["prompt_ids"] is not None and row["input_logprobs"] is not None:
        yield from _tokens(row, "input", row["prompt_ids"][len(_silent_ids(row)) :])


def _silent_ids(row: Row) -> Sequence[int]:
    """The ids of an echoed prompt that stand before those with logprobs: all of them where it has none."""
    ids: Sequence[int] = row["prompt_ids"] or ()
    return ids[: len(ids) - len(row["input_logprobs"] or ())]


def _completion_token(piece: TokenPiece) -> str:
    text = piece.text
    return f"bytes:{_escaped(piece.data)}" if text is None else text


def _alternatives(token: int, logprob: float | None, top: _Top, *, piece: Pieces) -> dict[str, float]:
    """The likeliest tokens and the token itself, by text; of several with one text the likeliest."""
    found: dict[str, float] = {}
    own = [] if logprob is None else [(token, logprob)]
    for each, value in [*(top or ()), *own]:
        found.setdefault(_completion_token(piece(each)), _finite(value))
    return found


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    """The first token of a prompt has no logprob: 0.0, since the response types take no null there."""
    if logprob is None:
        return 0.0
    return logprob if math.isfinite(logprob) else NEVER


def _text_offsets(text: str, pieces: Sequence[TokenPiece]) -> list[int]:
    """Where in `text` each token begins, in characters; those behind a trimmed stop begin at its end.

    A token in the middle of a character begins where that character does. Special tokens take room only where the text
    shows them, and a space that the decoder dropped at the start takes none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at = [], 0
    for piece in pieces:
        if piece.data[:1] and piece.data[0] & 0xC0 != 0x80:
            at += len(decoder.decode(b"", final=True))  # an unfinished character ends here
        offsets.append(min(len(text), at))
        if piece.special:
            shown = piece.data.decode()
            at += len(shown) if text.startswith(shown, at) else 0
            continue
        shown = decoder.decode(piece.data)
        dropped = at == 0 and shown.startswith(" ") and not text.startswith(" ")
        at += len(shown) - dropped
    return offsets
