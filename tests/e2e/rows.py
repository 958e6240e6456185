"""Writes the inputs of the end-to-end tests, and reads and compares their outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_STEMS = [
    "The quick brown fox jumps over the lazy dog. ",
    "The quick brown fox is fine, thank you! ",
    "Hello there, how are you today? ",
    "def add(a, b):\n    return a + b\n\nprint(add(1, ",
    "",
]
_FLOATS = (
    *("output_logprobs", "output_top_logprobs", "cumulative_logprob", "mean_logprob"),
    *("input_logprobs", "input_top_logprobs", "output_ids_logprobs", "input_ids_logprobs", "score_logprobs"),
)
TOLERANCE = 1e-4
"""Allowed difference of logprobs, in nats per token; everything else must be equal."""


def prompts(count: int, seed: int) -> list[str]:
    """Texts of mixed lengths that share prefixes; some are equal."""
    rng = Random(seed)
    return [rng.choice(_STEMS) * rng.randint(1, 2) + str(rng.randint(0, count // 2)) for _ in range(count)]


def write_lines(path: Path, lines: Iterable[bytes | dict[str, Any]]) -> Path:
    """Write a JSONL file of rows, and of raw lines as they are."""
    data = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def mixed_lines(count: int, seed: int = 0, longest: int = 24) -> list[bytes | dict[str, Any]]:
    """Rows of every supported kind, and some invalid ones."""
    rng = Random(seed)
    texts = prompts(count, seed)
    return [_mixed(i, texts[i], rng, longest) for i in range(count)]


def _mixed(i: int, text: str, rng: Random, longest: int) -> bytes | dict[str, Any]:
    length = rng.randint(1, longest)
    greedy = {"temperature": 0, "max_new_tokens": length}
    drawn = {"temperature": 1.1, "top_k": -1, "top_p": 1.0, "max_new_tokens": length}
    name = f"row {i} ✓"
    body = {"model": "*", "max_tokens": length, "temperature": 0.9}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions"}
    kinds: list[Any] = [
        lambda: {"id": name, "text": text, **greedy, "source": {"line": i}},
        lambda: {"id": name, "text": text, "sampling_params": drawn, "seed": i * 7919},
        lambda: {"id": name, "text": text, "sampling_params": drawn, "return_logprob": True, "top_logprobs_num": i % 4},
        lambda: {"id": name, "text": text, **drawn, "n": 2, "seed": i},
        lambda: {"id": name, "text": text, **drawn, "stop": ["a", "th", "e "], "no_stop_trim": i % 2 == 0},
        lambda: {"text": text, **greedy, "return_logprob": True, "top_logprobs_num": 2},
        lambda: {"id": name, "text": [text, text + "?", "Stop here"], **drawn, "n": 1 + i % 2},
        lambda: {**line, "body": {**body, "prompt": text, "logprobs": 3, "seed": 11, "user": "someone"}},
        lambda: {
            **line,
            "url": "/v1/chat/completions",
            "body": {**body, "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 1},
        },
        lambda: {"id": name, "text": "Every eleventh row is the same.", "temperature": 0, "max_new_tokens": 20},
        lambda: {"id": name, "input_ids": [5 + i % 7] * (1 + i % 40), **drawn, "min_new_tokens": min(length, 6)},
        lambda: {
            **{"id": name, "text": text, **drawn, "max_new_tokens": i % 3, "return_logprob": True},
            **{"logprob_start_len": i % 2, "top_logprobs_num": i % 4, "return_text_in_logprobs": i % 5 == 0},
        },
        lambda: {"id": name, "text": [text, "Stop here"], "completions": [" and on", [7, 8], f" {i}"], "source": i},
    ]
    invalid: list[Any] = [
        lambda: b'{"id": "cut", "text": ',
        lambda: {"id": name, "note": "no prompt"},
        lambda: {"id": name, "text": text, "temperature": -1},
    ]
    return rng.choice(invalid)() if i % 29 == 28 else kinds[i % len(kinds)]()


def read(path: Path) -> pa.Table:
    """The table of a results file, with page checksums verified."""
    return pq.read_table(path, page_checksum_verification=True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    rows: list[dict[str, Any]] = read(path).to_pylist()
    return rows


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Id -> row of a results file with one sample per row."""
    rows = rows_of(path)
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def assert_same(actual: pa.Table, expected: pa.Table, ignore: Sequence[str] = ()) -> None:
    """Assert that all columns and rows are equal, logprobs and their sums within the tolerance."""
    assert actual.schema == expected.schema
    assert len(actual) == len(expected)
    for name in expected.column_names:
        if name in ignore:
            continue
        if name == "scores":
            _assert_same_scores(actual[name].to_pylist(), expected[name].to_pylist())
            continue
        left, right = actual[name].to_pylist(), expected[name].to_pylist()
        if name not in _FLOATS:
            differing = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
            first = next(iter(differing), 0)
            assert not differing, f"{name} differs in rows {differing[:5]}: {left[first]!r} is not {right[first]!r}"
            continue
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert (a is None) == (b is None), f"{name} of row {i}"
            if a is not None:
                a, b = (np.array(x, np.float64) for x in (a, b))  # null becomes NaN
                count = max(1, expected["completion_tokens"][i].as_py()) if name == "cumulative_logprob" else 1
                np.testing.assert_allclose(a, b, atol=TOLERANCE * count, rtol=0, err_msg=f"{name} of row {i}")


def _assert_same_scores(actual: list[Any], expected: list[Any]) -> None:
    for i, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert (left is None) == (right is None), f"scores of row {i}"
        for a, b in zip(left or (), right or (), strict=True):
            assert (a["tokens"], a["is_greedy"]) == (b["tokens"], b["is_greedy"]), f"scores of row {i}"
            np.testing.assert_allclose([a["sum"], a["mean"]], [b["sum"], b["mean"]], atol=TOLERANCE * a["tokens"])
