"""Rows with random values of every supported field.

`FIELD_DRAWS` is the place to add a field: its probability, the fields that must be supported, and a function of the
random generator and the row so far that returns the fields and their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from batchgen.request.fields.declared import FIELDS
from tests.models.adapters import KINDS, save_adapter

VOCAB = 360
HIDDEN = 64
"""Vocabulary size and hidden size of the model of `tests.e2e.model`."""
ADAPTERS = ("two", "all")
PROCESSOR = "boost"

Fields = dict[str, Any]
STEMS = (
    "The quick brown fox jumps over the lazy dog. ",
    "The quick brown fox is fine, thank you! ",
    "Hello there, how are you today? I am fine. ",
    "def add(a, b):\n    return a + b\n\nprint(add(1, ",
    "Zażółć gęślą jaźń — 東京 ",
)
WORDS = ("th", "a", "e ", " the", "o", "ż", "n\n", "1", "fox", ", ", "qu")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Draw:
    """A random choice of values for some fields."""

    weight: float
    """Probability that a row gets the fields."""
    fields: tuple[str, ...]
    """Fields that must be supported."""
    make: Callable[[Random, Mapping[str, Any]], Fields]


def _ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCAB) for _ in range(count)]


def _constraint(rng: Random, row: Mapping[str, Any]) -> Fields:
    kind = rng.choice(["json_schema", "regex", "ebnf", "choice", "response_format", "structural_tag"])
    found: Fields = {
        "json_schema": SCHEMA,
        "regex": rng.choice(["[a-f]{3,9}", "(yes|no|maybe)( and (yes|no))*", "[0-9]+\\.[0-9]{2}"]),
        "ebnf": 'root ::= "(" root ")" | [xyz]+',
        "choice": ["alpha", "alphabet", "beta", "żółć"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        "structural_tag": {
            "type": "structural_tag",
            "format": {"type": "const_string", "value": "<tag>constant</tag>"},
        },
    }
    return {kind: found[kind]}


def _logprobs(rng: Random, row: Mapping[str, Any]) -> Fields:
    return {"return_logprob": True, "top_logprobs_num": rng.choice([0, 0, 1, 3, 7])}


def _more_logprobs(rng: Random, row: Mapping[str, Any]) -> Fields:
    values: dict[str, Callable[[], Any]] = {
        "logprob_start_len": lambda: rng.choice([0, 1]),
        "token_ids_logprob": lambda: _ids(rng, rng.randint(1, 4)),
        "return_text_in_logprobs": lambda: True,
    }
    return {name: values[name]() for name in rng.sample(sorted(values), rng.randint(1, 3)) if name in SUPPORTED}


def _states(rng: Random, row: Mapping[str, Any]) -> Fields:
    options = {
        "layers": rng.sample([-1, 0, 1, 2], rng.randint(1, 3)),
        "tokens": rng.choice(["prompt", "output", "all", "last"]),
        "pool": rng.choice(["none", "last", "mean"]),
    }
    return {"return_hidden_states": rng.choice([True, options])}


def _bad_words(rng: Random, row: Mapping[str, Any]) -> Fields:
    return {"bad_words": [rng.choice(WORDS), _ids(rng, 1), _ids(rng, 2), rng.choice(WORDS)]}


def _allowed(rng: Random, row: Mapping[str, Any]) -> Fields:
    return {"allowed_token_ids": sorted(set(_ids(rng, 60)))}


SUPPORTED = frozenset(field.name for field in FIELDS if field.supported)

FIELD_DRAWS: tuple[Draw, ...] = (
    Draw(0.4, ("seed",), lambda rng, row: {"seed": rng.randrange(-(2**63), 2**63)}),
    Draw(0.2, ("top_k",), lambda rng, row: {"top_k": rng.choice([0, 1, 5, 40])}),
    Draw(0.2, ("top_p",), lambda rng, row: {"top_p": rng.choice([0.3, 0.8, 0.99])}),
    Draw(0.2, ("min_p",), lambda rng, row: {"min_p": rng.choice([0.02, 0.2])}),
    Draw(0.2, ("n",), lambda rng, row: {"n": rng.randint(2, 4)}),
    Draw(0.15, ("best_of",), lambda rng, row: {"best_of": row.get("n", 1) + rng.randint(0, 2)}),
    Draw(0.25, ("stop",), lambda rng, row: {"stop": rng.sample(WORDS, rng.randint(1, 3))}),
    Draw(0.15, ("stop_regex",), lambda rng, row: {"stop_regex": rng.choice(["[aeiou]{2}", "\\d+", "[ -]\\w{3}"])}),
    Draw(0.15, ("stop_token_ids",), lambda rng, row: {"stop_token_ids": _ids(rng, 20)}),
    Draw(0.3, ("ignore_eos",), lambda rng, row: {"ignore_eos": True}),
    Draw(0.15, ("no_stop_trim",), lambda rng, row: {"no_stop_trim": True}),
    Draw(0.2, ("min_new_tokens",), lambda rng, row: {"min_new_tokens": rng.randint(1, row["max_new_tokens"])}),
    Draw(0.15, ("skip_special_tokens",), lambda rng, row: {"skip_special_tokens": False}),
    Draw(0.1, ("spaces_between_special_tokens",), lambda rng, row: {"spaces_between_special_tokens": False}),
    Draw(0.2, ("frequency_penalty",), lambda rng, row: {"frequency_penalty": rng.choice([-1.5, 0.4, 2])}),
    Draw(0.2, ("presence_penalty",), lambda rng, row: {"presence_penalty": rng.choice([-0.7, 1.1])}),
    Draw(0.2, ("repetition_penalty",), lambda rng, row: {"repetition_penalty": rng.choice([0.7, 1.2, 1.9])}),
    Draw(0.2, ("logit_bias",), lambda rng, row: {"logit_bias": {str(i): rng.uniform(-9, 9) for i in _ids(rng, 5)}}),
    Draw(0.15, ("bad_words",), _bad_words),
    Draw(0.1, ("allowed_token_ids",), _allowed),
    Draw(0.2, ("json_schema", "regex", "ebnf", "choice", "response_format", "structural_tag"), _constraint),
    Draw(0.4, ("return_logprob", "top_logprobs_num"), _logprobs),
    Draw(0.15, ("echo",), lambda rng, row: {"echo": True}),
    Draw(0.1, ("suffix",), lambda rng, row: {"suffix": rng.choice([" END", "\n東京"])}),
    Draw(0.2, ("return_hidden_states",), _states),
    Draw(0.3, ("lora_path",), lambda rng, row: {"lora_path": rng.choice(ADAPTERS)}),
    Draw(
        0.15,
        ("custom_logit_processor", "custom_params"),
        lambda rng, row: {
            "custom_logit_processor": PROCESSOR,
            "custom_params": {"token": rng.randrange(4, VOCAB), "by": rng.choice([3, 8])},
        },
    ),
    Draw(0.1, ("stream",), lambda rng, row: {} if "best_of" in row else {"stream": True}),
)


def mixed_options(model: Path, folder: Path) -> dict[str, Any]:
    """Engine options for the rows' adapters, which are written to `folder`, and their logit processor."""
    adapters = {name: save_adapter(model, folder / name, seed=i, **KINDS[name]) for i, name in enumerate(ADAPTERS)}
    return {"lora": adapters, "logit_processor": {PROCESSOR: "tests.e2e.processors:boost"}}


def mixed_rows(count: int, seed: int) -> list[Fields]:
    """Random rows. Each has an id, so that its noise does not depend on its position."""
    rng = Random(seed)
    return [_row(rng, i) for i in range(count)]


def _row(rng: Random, number: int) -> Fields:
    length = rng.randint(1, 20)
    row: Fields = {"max_new_tokens": length, "temperature": rng.choice([0, 0, 0.8, 1.0, 1.5])}
    row |= {"top_k": -1, "top_p": 1.0}
    if rng.random() < 0.1 and SUPPORTED.issuperset(("completion", "completions")):
        return {"id": f"m{number}", **_scored(rng)}
    for draw in FIELD_DRAWS:
        if rng.random() < draw.weight and SUPPORTED.issuperset(draw.fields):
            row |= draw.make(rng, row)
    if row.get("return_logprob") and rng.random() < 0.4:
        row |= _more_logprobs(rng, row)
    if "n" not in row and rng.random() < 0.15:
        return _openai(rng, number, row)
    prompt = _prompt(rng)
    if "input_embeds" in prompt:  # no text to echo or append to, and no ids to score
        row = {name: value for name, value in row.items() if name not in ("echo", "suffix", "logprob_start_len")}
    return {"id": f"m{number}", **prompt, **(row if rng.random() < 0.5 else {"sampling_params": row})}


def _text(rng: Random) -> str:
    """A text that shares its beginning with others, or equals one."""
    return rng.choice(STEMS) * rng.randint(1, 2) + rng.choice(["", str(rng.randint(0, 30)), rng.choice(STEMS)])


def _prompt(rng: Random) -> Fields:
    kind = rng.choice(["text"] * 6 + ["texts", "ids", "ids", "messages", "embeds"])
    if kind == "texts":
        return {"text": [_text(rng), _text(rng)]}
    if kind == "ids":
        return {"input_ids": [9, 8, 7] * rng.randint(1, 12) + _ids(rng, rng.randint(0, 5))}
    if kind == "messages":
        return {"messages": [{"role": "user", "content": _text(rng)}]}
    if kind == "embeds" and "input_embeds" in SUPPORTED:
        return {"input_embeds": [[rng.gauss(0, 0.2) for _ in range(HIDDEN)] for _ in range(rng.randint(1, 9))]}
    return {"text": _text(rng)}


def _scored(rng: Random) -> Fields:
    row: Fields = {"text": _text(rng)} if rng.random() < 0.7 else {"input_ids": _ids(rng, rng.randint(1, 20))}
    if rng.random() < 0.5:
        row |= {"completion": rng.choice([" the dog", "fox. And", "żółć", _ids(rng, 6)])}
    else:
        row |= {"completions": [" the dog", " the cat", _ids(rng, 3)]}
    if rng.random() < 0.3:
        row |= {"lora_path": rng.choice(ADAPTERS)} if "lora_path" in SUPPORTED else {}
    return row


def _openai(rng: Random, number: int, row: Fields) -> Fields:
    """The row as an OpenAI batch line: the same fields under the endpoint's names."""
    chat = rng.random() < 0.5
    body = {"model": "*", **row}
    body["max_tokens"] = body.pop("max_new_tokens")
    if body.pop("return_logprob", False):
        top = body.pop("top_logprobs_num", 0)
        body |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
    prompt: Fields = {"messages": [{"role": "user", "content": _text(rng)}]} if chat else {"prompt": _text(rng)}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": f"m{number}", "method": "POST", "url": url, "body": body | prompt}
