"""A job with every kind of row, and the comparison of two runs of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np

from batchgen.request.completion import Completion
from tests.gpu.compare import Verdict
from tests.gpu.jobs import VOCAB
from tests.gpu.registry import Labelled

Row = dict[str, Any]
TOP = 20
NEAR_TIE = 1e-3
"""Difference of logprobs below which two tokens may swap when sums are in another order."""
LOGPROB_BOUND = 1e-3
STATE_BOUND = 1e-3
"""Allowed difference of hidden states, relative to the largest one."""
MIN_EQUAL_SHARE = 0.95
"""Share of sampled, penalized or constrained rows that must be exactly equal: their near ties are not visible in the
output."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no", "foo"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def _kinds(adapters: Sequence[str]) -> list[Row]:
    kinds: list[Row] = [
        {"temperature": 0},
        {"temperature": 0, "return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": 0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7, "n": 3},
        {"temperature": 1.0, "min_p": 0.05, "return_logprob": True, "token_ids_logprob": [4, 9]},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 1.0, "logit_bias": {"5": 3.0, "6": -100.0}, "bad_words": [[7], [8, 9]]},
        {"temperature": 1.0, "allowed_token_ids": [10, 20, 30, 40]},
        {"temperature": 1.0, "stop": ["e", "o", "the"], "ignore_eos": False},
        {"temperature": 0, "return_hidden_states": {"layers": [0, 1, -1], "tokens": "all"}},
        {"temperature": 0, "min_new_tokens": 3, "stop_token_ids": list(range(3, VOCAB, 2)), "ignore_eos": False},
        *({"temperature": 0, "lora_path": name} for name in adapters),
    ]
    if find_spec("xgrammar") is not None:
        kinds.append({"temperature": 1.0, "json_schema": SCHEMA, "ignore_eos": False})
        kinds.append({"temperature": 0, "regex": "[a-f]{2,9}", "ignore_eos": False})
    return kinds


def mixed_job(count: int, prompt: int, new_tokens: int, adapters: Sequence[str], seed: int) -> list[Row]:
    """`count` rows, each kind in turn, with prompts of up to about `prompt` tokens, many of which share prefixes."""
    rng = Random(seed)
    stems = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, prompt // 2))] for _ in range(4)]
    kinds = _kinds(adapters)
    rows = []
    for i in range(count):
        own = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, prompt // 2))]
        ids = rng.choice(stems) + own
        common = {"input_ids": ids, "max_new_tokens": new_tokens, "ignore_eos": True, "seed": i}
        rows.append({**common, **kinds[i % len(kinds)]})
    return rows


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """The rows with at least two top logprobs, which show near ties."""
    return [{**row, "return_logprob": True, "top_logprobs_num": max(2, row.get("top_logprobs_num", 0))} for row in rows]


def plain_greedy(row: Mapping[str, Any]) -> bool:
    """Whether only the model's logits decide the row's tokens."""
    modifying = ("repetition_penalty", "json_schema", "regex", "min_new_tokens", "logit_bias", "allowed_token_ids")
    return row["temperature"] == 0 and not any(name in row for name in modifying)


def tokens_before_near_tie(reference: Completion) -> int:
    """Number of tokens before the first near tie, for a greedy row of `with_gaps`."""
    ids, top = reference.output_ids or [], np.asarray(reference.output_top_logprobs)
    gaps = top.reshape(len(ids), -1) if len(ids) else np.zeros((0, 2))
    near = np.flatnonzero(gaps[:, 0] - gaps[:, 1] < NEAR_TIE)
    return int(near[0]) if len(near) else len(ids)


def compare(rows: Sequence[Row], got: Sequence[Completion], want: Sequence[Completion]) -> Iterator[Labelled]:
    """Compare a run of `rows` with a run of `with_gaps(rows)`, both in order: ids, then numbers where ids agree."""
    if len(got) != len(want):
        yield "completions", Verdict(False, float(abs(len(got) - len(want))), 0.0, 0.0, f"{len(got)}, not {len(want)}")
        return
    errors = [f"row {c.row_index}: {c.error.message}" for c in got if c.error is not None]
    yield "errors", Verdict(not errors, float(len(errors)), 0.0, 0.0, "; ".join(errors[:2]))
    pairs = [(rows[w.row_index], g, w) for g, w in zip(got, want, strict=True) if g.error is None and w.error is None]
    yield "greedy ids", _greedy(pairs)
    yield "other ids", _others(pairs)
    yield "logprobs", _logprobs(pairs)
    yield "hidden states", _states(pairs)


_Pairs = Sequence[tuple[Row, Completion, Completion]]


def _greedy(pairs: _Pairs) -> Verdict:
    wrong = []
    tokens = 0
    for row, got, want in pairs:
        if plain_greedy(row):
            same = tokens_before_near_tie(want)
            tokens += same
            if _ids(got)[:same] != _ids(want)[:same]:
                wrong.append(want.row_index)
    note = f"rows {wrong[:5]}" if wrong else f"{tokens} tokens before near ties"
    return Verdict(not wrong and tokens > 0, float(len(wrong)), 0.0, 0.0, note)


def _others(pairs: _Pairs) -> Verdict:
    others = [(got, want) for row, got, want in pairs if not plain_greedy(row)]
    wrong = [want.row_index for got, want in others if (_ids(got), got.text) != (_ids(want), want.text)]
    bound = (1 - MIN_EQUAL_SHARE) * len(others)
    note = f"rows {wrong[:5]} of {len(others)}" if wrong else ""
    return Verdict(len(wrong) <= bound, float(len(wrong)), 0.0, bound, note)


def _logprobs(pairs: _Pairs) -> Verdict:
    """Compare logprobs of the tokens before the first difference."""
    worst = 0.0
    for row, got, want in pairs:
        if row.get("return_logprob"):
            same = _common(_ids(got), _ids(want))
            worst = max(worst, _largest(got.output_logprobs, want.output_logprobs, same))
            if row.get("top_logprobs_num") == TOP:
                worst = max(worst, _largest(got.output_top_logprobs, want.output_top_logprobs, TOP * same))
            if row.get("token_ids_logprob"):
                count = len(row["token_ids_logprob"]) * same
                worst = max(worst, _largest(got.output_ids_logprobs, want.output_ids_logprobs, count))
            if got.input_logprobs is not None:
                worst = max(worst, _largest(got.input_logprobs, want.input_logprobs, len(got.input_logprobs)))
    return Verdict(worst <= LOGPROB_BOUND, worst, 0.0, LOGPROB_BOUND)


def _states(pairs: _Pairs) -> Verdict:
    worst = 0.0
    for row, got, want in pairs:
        if "return_hidden_states" in row:
            if got.states is None or want.states is None or len(got.states) != len(want.states):
                return Verdict(False, float("inf"), 0.0, STATE_BOUND, f"row {want.row_index} has none")
            known = (want.prompt_tokens or 0) + _common(_ids(got), _ids(want)) - 1
            for ours, theirs in zip(got.states, want.states, strict=True):
                a, b = (np.asarray(x.values, np.float64)[:known] for x in (ours, theirs))
                worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return Verdict(worst <= STATE_BOUND, worst, 0.0, STATE_BOUND)


def _ids(done: Completion) -> list[int]:
    return [int(i) for i in done.output_ids or ()]


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _largest(got: Any, want: Any, count: int) -> float:
    """Largest difference among the first `count` numbers; infinite if one side has fewer."""
    if got is None or want is None or len(got) < count or len(want) < count:
        return float("inf")
    a, b = (np.ma.filled(np.ma.asarray(x[:count], np.float64), 0.0) for x in (got, want))
    return float(np.abs(a - b).max(initial=0.0))
