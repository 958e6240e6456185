"""No row holds the others for a second: processor time between two tokens of a row while a hostile one runs too.

Reading a row, compiling its constraint and tokenising its text come before the first step.
"""

from __future__ import annotations

import string
import time
from itertools import pairwise
from typing import Any

import pytest

from batchgen import Engine
from batchgen.request.completion import StreamEvent

MOST_SECONDS = 1.0
STEPS = 48
AMBIGUOUS = "(a|b|ab|ba)*"
NESTED = {"$ref": "#/$defs/x"}
SCHEMA = {
    "$defs": {"x": {"anyOf": [{"type": "array", "items": NESTED}, {"type": "string"}, {"type": "object"}]}},
    "type": "array",
    "items": NESTED,
}
LETTERS = string.ascii_lowercase
WORDS = [f"{a}{b}{c}{d}" for a in LETTERS for b in LETTERS for c in "abcdefgh" for d in "xyz"]


def kinds(vocabulary: int, letters: list[int]) -> dict[str, dict[str, Any]]:
    """Fields of hostile rows; `letters` are the ids of "a" and "b"."""
    only = {"allowed_token_ids": letters}
    every = list(range(3, vocabulary))
    return {
        "many stop patterns": {"stop_regex": [f"[ab]+[ab]+[{i}-9]" for i in range(9)], "min_new_tokens": 39, **only},
        "long stop strings": {"stop": [f"{'a' * 9_990}{i}" for i in range(32)], **only},
        "an ambiguous pattern": {"regex": f"{AMBIGUOUS}!"},
        "an ambiguous grammar": {"ebnf": 'root ::= x "!"\nx ::= "" | "a" x | "b" x | "ab" x | "ba" x | "aba" x'},
        "a nested schema": {"json_schema": SCHEMA},
        "a long choice": {"choice": WORDS},
        "many bad words": {"bad_words": WORDS},
        "a bias on every token": {"logit_bias": {str(i): i % 7 - 3 for i in every}},
        "every token's logprob": {"return_logprob": True, "top_logprobs_num": vocabulary, "token_ids_logprob": every},
        "many samples": {"n": 3000, "max_new_tokens": 2},
        "every kind of state": {"return_hidden_states": {"layers": [0, -1], "tokens": "all"}, "n": 8},
        "a long suffix": {"suffix": "word " * 200_000, "echo": True, "max_new_tokens": 4},
        "penalties and filters": {"repetition_penalty": 1.9, "frequency_penalty": 1.5, "top_p": 0.01, "min_p": 0.2},
    }


KINDS = list(kinds(10, []))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_row_does_not_hold_the_others(engine: Engine, kind: str) -> None:
    letters = [engine.tokenizer.encode([letter])[0][-1] for letter in "ab"]
    fields = kinds(engine.model.spec.vocab_size, letters)[kind]
    common = {"ignore_eos": "json_schema" not in fields, "max_new_tokens": STEPS - 8, "temperature": 1.0, "seed": 1}
    watched = {"id": "watched", "text": "Once", "max_new_tokens": STEPS, "ignore_eos": True, "stream": True}
    moments: list[float] = []

    def listen(events: StreamEvent) -> None:
        moments.append(time.thread_time())

    done = list(engine.generate([watched, {**common, "id": "hostile", "text": "abab", **fields}], on_event=listen))
    assert {completion.id for completion in done} == {"watched", "hostile"}
    assert next(c for c in done if c.id == "watched").error is None
    assert len(moments) >= STEPS
    assert max(later - sooner for sooner, later in pairwise(moments)) < MOST_SECONDS
