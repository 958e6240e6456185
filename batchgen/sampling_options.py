"""Options that are run-wide defaults of the row fields of the same name, and those that say what such fields mean.

`seed` and `suffix` have none: `--seed` is the run's, from which those of rows derive; a suffix is a part of one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.checks import kind_of
from batchgen.errors import RowError
from batchgen.option_kinds import (
    BOOL,
    NAME_FUNCTION,
    REAL,
    TEXT,
    TOKEN_IDS,
    WORD,
    Kind,
    Option,
    choice,
    flag,
    whole,
)
from batchgen.params import HiddenStates
from batchgen.units import parse_bool, parse_logit_bias

__all__ = ["SAMPLING", "SAMPLING_OPTIONS"]

SAMPLING = "Sampling defaults"

_SPANS = ("all", "prompt", "output", "last")


def _some(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _json_object(text: str) -> str:
    """The text of a JSON object, as it stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(
            f"takes a JSON object, or @PATH of a file that holds one; this is no JSON: {problem}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"takes a JSON object, or @PATH of a file that holds one; this is {kind_of(value)}")
    return text


def _json_text(value: object) -> object:
    """A table as JSON; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"holds what JSON cannot say: {problem}") from None


def _biases(value: object) -> object:
    """A table of biases by token id, or a list of pairs, as a list of ID=X; anything else as it is."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [f"{item[0]}={item[1]}" if isinstance(item, list | tuple) and len(item) == 2 else item for item in value]


def _states(text: str) -> bool | dict[str, Any]:
    """What the field `return_hidden_states` takes, or a word for the commonest of it."""
    word = text.strip()
    if word in _SPANS:
        return {"tokens": word}
    if word == "mean":
        return {"pool": "mean"}
    if not word.startswith("{"):
        try:
            return parse_bool(word)
        except ValueError:
            raise ValueError(f"takes {', '.join(_SPANS)}, mean, true, false or a JSON object, got {text!r}") from None
    try:
        value: dict[str, Any] = json.loads(word)
        HiddenStates(**value)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"is no JSON: {problem}") from None
    except TypeError:
        raise ValueError(f"takes `layers` (a list), `tokens` and `pool`, got {word}") from None
    except RowError as problem:
        raise ValueError(problem.info.message.removeprefix("`return_hidden_states` ")) from None
    return value


SOME_TEXT = Kind("TEXT", _some)
GRAMMAR = Kind("TEXT|@PATH", _some, file=True)
JSON = Kind("JSON|@PATH", _json_object, file=True, write=_json_text)
BIASES = Kind("ID=X,...", parse_logit_bias, joined=True, write=_biases)
STATES = Kind("all|prompt|output|last|mean|JSON", _states, (str, bool), write=_json_text)

SAMPLING_OPTIONS: tuple[Option, ...] = (
    choice(
        "sampling_defaults",
        "model|openai",
        SAMPLING,
        "Where unset sampling fields come from: the model's generation_config.json, or 1.0, 1.0, -1, 0.0. "
        "Example: --sampling-defaults openai",
    ),
    Option("temperature", REAL, None, SAMPLING, "0 is greedy. Example: --temperature 0.7", "sampling"),
    Option("top_p", REAL, None, SAMPLING, "Nucleus share in (0, 1]. Example: --top-p 0.95", "sampling"),
    Option("top_k", whole(-1, 2**31), None, SAMPLING, "-1 or 0: all. Example: --top-k 40", "sampling"),
    Option("min_p", REAL, None, SAMPLING, "Share of the likeliest, in [0, 1]. Example: --min-p 0.05", "sampling"),
    Option(
        "max_new_tokens",
        whole(0, 2**31),
        None,
        SAMPLING,
        "Most tokens to generate; 128 by default. Example: --max-new-tokens 512",
        "sampling",
    ),
    Option(
        "min_new_tokens",
        whole(0, 2**31),
        None,
        SAMPLING,
        "Fewest tokens to generate. Example: --min-new-tokens 8",
        "sampling",
    ),
    Option("stop", TEXT, None, SAMPLING, "Stop string, repeatable. Example: --stop END", "sampling", repeat=True),
    Option(
        "stop_token_ids",
        TOKEN_IDS,
        None,
        SAMPLING,
        "Token ids that end a row. Example: --stop-token-ids 2,13",
        "sampling",
    ),
    Option("ignore_eos", BOOL, None, SAMPLING, "Go on past end-of-sequence. Example: --ignore-eos", "sampling"),
    Option("no_stop_trim", BOOL, None, SAMPLING, "Keep the stop in the text. Example: --no-stop-trim", "sampling"),
    Option(
        "skip_special_tokens",
        BOOL,
        None,
        SAMPLING,
        "Leave special tokens out of the text; on by default. Example: --no-skip-special-tokens",
        "sampling",
    ),
    Option(
        "spaces_between_special_tokens",
        BOOL,
        None,
        SAMPLING,
        "Put spaces between special tokens that are in the text; on by default. "
        "Example: --no-spaces-between-special-tokens",
        "sampling",
    ),
    Option("echo", BOOL, None, SAMPLING, "Put the prompt's text before the output's. Example: --echo", "sampling"),
    Option("n", whole(1, 2**20), None, SAMPLING, "Samples per prompt. Example: --n 4", "sampling"),
    Option("return_logprob", BOOL, None, SAMPLING, "Write output logprobs. Example: --return-logprob", "sampling"),
    Option(
        "top_logprobs_num",
        whole(0, 2**20),
        None,
        SAMPLING,
        "Most likely tokens to write per position. Example: --top-logprobs-num 5",
        "sampling",
    ),
    Option(
        "logprob_start_len",
        whole(-1, 2**31),
        None,
        SAMPLING,
        "Write prompt logprobs from this position on; -1: none. Example: --return-logprob --logprob-start-len 0",
        "sampling",
    ),
    Option(
        "token_ids_logprob",
        TOKEN_IDS,
        None,
        SAMPLING,
        "Token ids whose logprobs are written for every token. Example: --return-logprob --token-ids-logprob 2,13",
        "sampling",
    ),
    Option(
        "return_text_in_logprobs",
        BOOL,
        None,
        SAMPLING,
        "Write each token's text beside its logprob. Example: --return-logprob --return-text-in-logprobs",
        "sampling",
    ),
    Option(
        "return_hidden_states",
        STATES,
        None,
        SAMPLING,
        "Write hidden states: of all tokens (or true), the prompt's, the output's or the last alone, their mean, or "
        "what a row's object would say, as JSON. Example: --return-hidden-states last",
        "sampling",
    ),
    Option(
        "return_routed_experts",
        BOOL,
        None,
        SAMPLING,
        "Write the experts that each token went to, of a mixture of experts. Example: --return-routed-experts",
        "sampling",
    ),
    Option(
        "best_of",
        whole(1, 2**20),
        None,
        SAMPLING,
        "Samples to generate, of which the --n likeliest are kept. Example: --best-of 4",
        "sampling",
    ),
    Option(
        "frequency_penalty",
        REAL,
        None,
        SAMPLING,
        "Taken off a token's logit each time it was generated, in [-2, 2]. Example: --frequency-penalty 0.5",
        "sampling",
    ),
    Option(
        "presence_penalty",
        REAL,
        None,
        SAMPLING,
        "Taken off the logit of every token generated, in [-2, 2]. Example: --presence-penalty 0.5",
        "sampling",
    ),
    Option(
        "repetition_penalty",
        REAL,
        None,
        SAMPLING,
        "Divides the positive logits of tokens generated and multiplies negative ones, in (0, 2]. "
        "Example: --repetition-penalty 1.1",
        "sampling",
    ),
    choice(
        "repetition_penalty_scope",
        "output|prompt+output",
        SAMPLING,
        "Tokens that the repetition penalty falls on: those generated, or the prompt's as well (the rule of Hugging "
        "Face and vLLM). Example: --repetition-penalty-scope prompt+output",
        "engine",
    ),
    Option(
        "logit_bias",
        BIASES,
        None,
        SAMPLING,
        "Added to the logits of tokens, in [-100, 100]. Example: --logit-bias 13=-100,20=2.5",
        "sampling",
    ),
    Option(
        "bad_words",
        TEXT,
        None,
        SAMPLING,
        "String that is never completed, repeatable. Example: --bad-words sorry",
        "sampling",
        repeat=True,
    ),
    Option(
        "allowed_token_ids",
        TOKEN_IDS,
        None,
        SAMPLING,
        "The only token ids that may be drawn. Example: --allowed-token-ids 2,13",
        "sampling",
    ),
    Option(
        "json_schema",
        JSON,
        None,
        SAMPLING,
        "Schema that the text must satisfy: the JSON itself, or @ and a file's path. "
        "Example: --json-schema @person.json",
        "sampling",
    ),
    Option(
        "regex",
        SOME_TEXT,
        None,
        SAMPLING,
        "Pattern that the whole text must match. Example: --regex '[0-9]{4}'",
        "sampling",
    ),
    Option(
        "ebnf",
        GRAMMAR,
        None,
        SAMPLING,
        "Grammar of the text: itself, or @ and a file's path. Example: --ebnf @answer.gbnf",
        "sampling",
    ),
    Option(
        "structural_tag",
        JSON,
        None,
        SAMPLING,
        "Structural tag that the text must satisfy: the JSON itself, or @ and a file's path. "
        "Example: --structural-tag @calls.json",
        "sampling",
    ),
    Option(
        "choice",
        SOME_TEXT,
        None,
        SAMPLING,
        "One of the strings that the whole text may be, repeatable. Example: --choice yes --choice no",
        "sampling",
        repeat=True,
    ),
    Option(
        "stop_regex",
        TEXT,
        None,
        SAMPLING,
        "Pattern whose match in the output ends a row, repeatable. Example: --stop-regex '[0-9]+'",
        "sampling",
        repeat=True,
    ),
    choice(
        "logprobs_mode",
        "raw|processed",
        SAMPLING,
        "Distribution of logprobs: the model's (raw), or the one drawn from, after penalties, masks and filters "
        "(processed). Example: --logprobs-mode processed",
        "engine",
    ),
    Option(
        "logit_processor",
        NAME_FUNCTION,
        (),
        SAMPLING,
        "Python function that rows may name as `custom_logit_processor`, repeatable. "
        "Example: --logit-processor calm=my_module:calm",
        "engine",
        repeat=True,
    ),
    Option(
        "custom_logit_processor",
        WORD,
        None,
        SAMPLING,
        "Name of the --logit-processor that rows go through. Example: --custom-logit-processor calm",
        "sampling",
    ),
    Option(
        "custom_params",
        JSON,
        None,
        SAMPLING,
        "What that processor is told: a JSON object itself, or @ and a file's path. "
        "Example: --custom-params '{\"strength\": 2}'",
        "sampling",
    ),
    Option(
        "lora_path",
        WORD,
        None,
        SAMPLING,
        "Name of the --lora adapter that rows run with. Example: --lora-path fr",
        "sampling",
    ),
    Option(
        "stream",
        BOOL,
        None,
        SAMPLING,
        "Write token-by-token events of rows to --events. Example: --events events.jsonl --stream",
        "sampling",
    ),
    Option(
        "stop_on_repeat",
        whole(4, 2**20),
        None,
        SAMPLING,
        "End a sample whose last N tokens are one block of at most N/4 tokens over and over, with finish_reason "
        "repetition; off by default. Example: --stop-on-repeat 64",
        "engine",
    ),
    flag(
        "lenient_schemas",
        SAMPLING,
        "Run rows whose JSON Schema has keywords that cannot be enforced, without these. Example: --lenient-schemas",
        "engine",
    ),
)
