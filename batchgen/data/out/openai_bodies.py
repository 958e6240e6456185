"""Conversion of output rows to lines of OpenAI's batch output: `text_completion`, `chat.completion`, lists of
embeddings, the results of a rerank endpoint, and errors.

Pure functions from rows of a results file to JSON values. Values that those endpoints do not have are mapped to the
nearest one, as documented in `batchgen help export`.
"""

from __future__ import annotations

import codecs
import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from batchgen.data.lines import line_digest
from batchgen.data.row_shapes import RowShape
from batchgen.errors import ErrorCode
from batchgen.request.foreign_text import read_json

Row = Mapping[str, Any]

IMPOSSIBLE_LOGPROB = -9999.0
"""Logprob of a token with probability 0, as the endpoints return it: JSON has no minus infinity."""

_SERVER_ERRORS = frozenset(
    {ErrorCode.OOM, ErrorCode.NAN_LOGITS, ErrorCode.ENGINE_CRASH, ErrorCode.INTERNAL, ErrorCode.PROCESSOR_ERROR}
)
"""Errors with status 500: the request was valid. All others have status 400."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token as bytes of the text."""

    data: bytes
    """UTF-8 bytes of the token, which may be part of a character only."""
    special: bool
    """Whether the token is a special token."""

    @property
    def text(self) -> str | None:
        """The token as text; None if its bytes are not whole characters."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


PieceLookup = Callable[[int], TokenPiece]
"""Token id -> piece."""


def batch_line(rows: Sequence[Row], shape: RowShape, run: Mapping[str, Any], piece: PieceLookup) -> tuple[bool, Any]:
    """(whether the row succeeded, its line for the output file or else for the errors file).

    Args:
        rows: all output rows of one input row, in order.
        shape: request shape of the input row.
        run: the run record of the output's footer.
        piece: token id -> piece; called only for rows with logprobs.
    """
    first = rows[0]
    digest = line_digest(run["fingerprint"], first["row_index"])
    failed = next((row["error"] for row in rows if row["error"] is not None), None)
    if failed is None:
        status, body = 200, _list_body(rows, run, digest) or _body(rows, shape, run, piece, digest)
    else:
        status, body = _error(failed)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return failed is None, {"id": f"batch_req_{digest}", "custom_id": first["id"], "response": response, "error": None}


def _error(error: Mapping[str, Any]) -> tuple[int, Any]:
    is_server_error = error["code"] in _SERVER_ERRORS
    error_type = "server_error" if is_server_error else "invalid_request_error"
    body = {"message": error["message"], "type": error_type, "param": error["param"], "code": error["code"]}
    return 500 if is_server_error else 400, {"error": body}


def _list_body(rows: Sequence[Row], run: Mapping[str, Any], digest: str) -> dict[str, Any] | None:
    """The body of a batch line to embed or to rank documents; None for any other."""
    asked = read_json(rows[0]["extra"]).get("body", {}) if rows[0]["extra"] else {}
    about, usage = {"model": _model_name(run)}, _usage(rows)
    if rows[0].get("embedding") is not None:
        base64 = asked.get("encoding_format") == "base64"
        values = (_encoded(row["embedding"]) if base64 else row["embedding"] for row in rows)
        data = [{"object": "embedding", "index": at, "embedding": value} for at, value in enumerate(values)]
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return {"object": "list", "data": data, **about, "usage": counts}
    if not rows[0]["scores"] or "score" not in rows[0]["scores"][0]:
        return None
    ranked = sorted(
        ({"index": at, "relevance_score": row["scores"][0]["score"]} for at, row in enumerate(rows)),
        key=lambda result: -result["relevance_score"],
    )
    counts = {"total_tokens": usage["total_tokens"]}
    return {"id": f"rerank-{digest}", **about, "usage": counts, "results": ranked[: asked.get("top_n")]}


def _encoded(embedding: Sequence[float]) -> str:
    """Little-endian float32 as base64."""
    return b64encode(np.asarray(embedding, "<f4").tobytes()).decode()


def _body(rows: Sequence[Row], shape: RowShape, run: Mapping[str, Any], piece: PieceLookup, digest: str) -> Any:
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
                **({} if row["constraint_ok"] is None else {"constraint_ok": row["constraint_ok"]}),
                **({} if row["scores"] is None else _scores(row)),
            }
            for index, row in enumerate(rows)
        ],
        "usage": _usage(rows),
        "system_fingerprint": f"fp_{run['fingerprint'][:12]}",
    }


def _model_name(run: Mapping[str, Any]) -> str:
    """The model's id, or the name of its folder without the local path."""
    name = str(run["model"])
    return name.rstrip("/").rpartition("/")[2] if name.startswith((".", "/", "~")) else name


def _finish_reason(row: Row) -> Literal["stop", "length", "tool_calls"]:
    """`repetition` and `abort` become "length"; `stop_reason` tells them apart."""
    if row["finish_reason"] != "stop":
        return "length"
    return "stop" if row.get("tool_calls") is None else "tool_calls"


def finish_reason(choice: Mapping[str, Any]) -> str:
    """The finish reason of a results row, from its choice."""
    reason, stop = str(choice["finish_reason"]), choice["stop_reason"]
    reason = "stop" if reason == "tool_calls" else reason
    return str(stop) if reason == "length" and stop is not None else reason


def _scores(row: Row) -> dict[str, Any]:
    """Scores and flat token logprobs of the scored texts; an extension, since those endpoints have no scoring."""
    return {"scores": row["scores"], "score_logprobs": [_finite(logprob) for logprob in row["score_logprobs"] or ()]}


def _stop_reason(row: Row) -> str | None:
    """The stop that ended the row, or a finish reason that OpenAI lacks; vLLM has the same extension."""
    if row["finish_reason"] in ("repetition", "abort"):
        return str(row["finish_reason"])
    return None if row["stop_kind"] == "eos" else row["matched_stop"]


def _usage(rows: Sequence[Row]) -> dict[str, Any]:
    """Token usage: each prompt counts once for all its samples; samples discarded by `best_of` count as generated."""
    prompts = [row for row in rows if row["sample_index"] == 0]
    prompt_tokens = sum(row["prompt_tokens"] for row in prompts)
    dropped = sum(row["dropped_tokens"] or 0 for row in rows)
    copied = sum(row["completion_tokens"] for row in rows if row["dedup_of"] is not None)
    completion_tokens = sum(row["completion_tokens"] for row in rows) + dropped
    thoughts = sum(row.get("reasoning_tokens") or 0 for row in rows)  # outputs of older versions have no such column
    counts = {"reasoning_tokens": thoughts, "copied_tokens": copied, "dropped_tokens": dropped}
    details = {name: count for name, count in counts.items() if count}
    media = sum(row.get("media_tokens") or 0 for row in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(row["cached_tokens"] or 0 for row in prompts),
            **({"media_tokens": media} if media else {}),
        },
        **({"completion_tokens_details": details} if details else {}),
    }


def _chat_choice(row: Row, shape: RowShape, piece: PieceLookup) -> dict[str, Any]:
    logprobs = None
    if row["output_logprobs"] is not None:
        content = [
            {**_chat_piece(piece, token, logprob), "top_logprobs": [_chat_piece(piece, *pair) for pair in top or ()]}
            for token, logprob, top in _tokens(row, "output")
        ]
        logprobs = {"content": content, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": row["text"] or "", "refusal": None}
    if row.get("reasoning") is not None:
        message["reasoning"] = row["reasoning"]
    if row.get("tool_calls") is not None:  # outputs of older versions have no such column
        message["content"] = row["text"] or None
        message["tool_calls"] = read_json(row["tool_calls"], unwritable=True)
    if row.get("tool_calls_error") is not None:
        message["tool_calls_error"] = row["tool_calls_error"]
    return {"message": message, "logprobs": logprobs}


def _chat_piece(piece: PieceLookup, token: int, logprob: float) -> dict[str, Any]:
    own = piece(token)
    text = _escaped(own.data) if own.text is None else own.text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(own.data)}


def _completion_choice(row: Row, shape: RowShape, piece: PieceLookup) -> dict[str, Any]:
    text = row["text"] or ""
    if row["output_logprobs"] is None:
        return {"text": text, "logprobs": None}
    tokens = [*_prompt_tokens(row), *_tokens(row, "output")] if shape.echo else list(_tokens(row, "output"))
    pieces = [piece(token) for token, _, _ in tokens]
    # Echoed prompt tokens without logprobs, with which the text begins.
    before = [piece(token) for token in _prompt_ids_without_logprobs(row)] if shape.echo else []
    has_top = bool(row["output_top_ids"] or row["input_top_ids"])
    logprobs = {
        "tokens": [_completion_token(item) for item in pieces],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in tokens],
        "top_logprobs": [_alternatives(*token, piece=piece) for token in tokens] if has_top else None,
        "text_offset": _text_offsets(text, [*before, *pieces], row.get("reasoning_tokens"))[len(before) :],
    }
    return {"text": text, "logprobs": logprobs}


_TopLogprobs = Sequence[tuple[int, float]] | None


def _tokens(row: Row, side: Literal["input", "output"], ids: Sequence[int] | None = None) -> Iterator[Any]:
    """(id, logprob, top tokens as (id, logprob) or None) of each input or output token."""
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
    """Tokens of the echoed prompt, in the form of `_tokens`, for those that have ids and logprobs."""
    if row["prompt_ids"] is not None and row["input_logprobs"] is not None:
        yield from _tokens(row, "input", row["prompt_ids"][len(_prompt_ids_without_logprobs(row)) :])


def _prompt_ids_without_logprobs(row: Row) -> Sequence[int]:
    """Ids of the echoed prompt tokens before the first one with a logprob."""
    ids: Sequence[int] = row["prompt_ids"] or ()
    return ids[: len(ids) - len(row["input_logprobs"] or ())]


def _completion_token(piece: TokenPiece) -> str:
    text = piece.text
    return f"bytes:{_escaped(piece.data)}" if text is None else text


def _alternatives(token: int, logprob: float | None, top: _TopLogprobs, *, piece: PieceLookup) -> dict[str, float]:
    """Text -> logprob of the top tokens and the token itself; of tokens with equal text, the most likely."""
    logprobs: dict[str, float] = {}
    chosen = [] if logprob is None else [(token, logprob)]
    for each, value in [*(top or ()), *chosen]:
        logprobs.setdefault(_completion_token(piece(each)), _finite(value))
    return logprobs


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    """The logprob as JSON: 0.0 for None (the first prompt token), because the response types allow no null."""
    if logprob is None:
        return 0.0
    return logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB


def _text_offsets(text: str, pieces: Sequence[TokenPiece], thinking: int | None = None) -> list[int]:
    """Offset in `text` of each token, in characters; tokens after a trimmed stop are at the end of the text.

    `thinking`: number of tokens of thoughts, which are not in the text; their offset is 0, as that of their markers.

    A token inside a character has the offset of that character. Special tokens, and a leading space that the decoder
    removes, have a length only if the text contains them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, at = [], 0
    if thinking is not None:
        at = -max(0, b"".join(piece.data for piece in pieces).decode("utf-8", "replace").rfind(text))
    for piece in pieces:
        if piece.data[:1] and piece.data[0] & 0xC0 != 0x80:
            at += len(decoder.decode(b"", final=True))  # an unfinished character ends here
        offsets.append(max(0, min(len(text), at)))
        if piece.special:
            shown = piece.data.decode()
            at += len(shown) if thinking is not None or text.startswith(shown, at) else 0
            continue
        shown = decoder.decode(piece.data)
        dropped = at == 0 and shown.startswith(" ") and not text.startswith(" ")
        at += len(shown) - dropped
    return offsets
