"""Options that set run-wide defaults of the row fields of the same name, and options that change their meaning.

The fields `seed` and `suffix` have no such option: `--seed` is the run seed, and a suffix belongs to one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.option_types import (
    BOOL,
    NAME,
    NAME_FUNCTION,
    NUMBER,
    TEXT,
    TOKEN_IDS,
    Option,
    ValueType,
    choice,
    flag,
    int_range,
)
from batchgen.config.units import parse_bool, parse_logit_bias
from batchgen.errors import RowError
from batchgen.request.checks import json_type
from batchgen.request.params import HiddenStates

__all__ = ["SAMPLING", "SAMPLING_OPTIONS"]

SAMPLING = "Sampling defaults"

_TOKEN_RANGES = ("all", "prompt", "output", "last")


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _json_object(text: str) -> str:
    """Check that the text is a JSON object and return it unchanged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(
            f"must be a JSON object, or @PATH of a file that contains one; this is not JSON: {problem}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, or @PATH of a file that contains one; this is {json_type(value)}")
    return text


def _json_text(value: object) -> object:
    """JSON text of a mapping; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"has a value that JSON cannot represent: {problem}") from None


def _logit_bias_items(value: object) -> object:
    """List of ID=X strings of a mapping or a list of pairs; other values unchanged."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return [f"{item[0]}={item[1]}" if isinstance(item, list | tuple) and len(item) == 2 else item for item in value]


def _hidden_states(text: str) -> bool | dict[str, Any]:
    """Value of the field `return_hidden_states`, given as JSON or as a keyword for common values."""
    word = text.strip()
    if word in _TOKEN_RANGES:
        return {"tokens": word}
    if word == "mean":
        return {"pool": "mean"}
    if not word.startswith("{"):
        try:
            return parse_bool(word)
        except ValueError:
            raise ValueError(
                f"must be {', '.join(_TOKEN_RANGES)}, mean, true, false or a JSON object, got {text!r}"
            ) from None
    try:
        value: dict[str, Any] = json.loads(word)
        HiddenStates(**value)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"is not valid JSON: {problem}") from None
    except TypeError:
        raise ValueError(f"must be an object of `layers` (a list), `tokens` and `pool`, got {word}") from None
    except RowError as problem:
        raise ValueError(problem.info.message.removeprefix("`return_hidden_states` ")) from None
    return value


NONEMPTY_TEXT = ValueType("TEXT", _nonempty)
GRAMMAR = ValueType("TEXT|@PATH", _nonempty, accepts_file=True)
JSON = ValueType("JSON|@PATH", _json_object, accepts_file=True, to_text=_json_text)
LOGIT_BIAS = ValueType("ID=X,...", parse_logit_bias, comma_separated=True, to_text=_logit_bias_items)
HIDDEN_STATES = ValueType("all|prompt|output|last|mean|JSON", _hidden_states, (str, bool), to_text=_json_text)

SAMPLING_OPTIONS: tuple[Option, ...] = (
    choice(
        "sampling_defaults",
        "model|openai",
        SAMPLING,
        "Defaults of temperature, top_p, top_k and min_p: the model's generation_config.json, or 1.0, 1.0, -1, 0.0. "
        "Example: --sampling-defaults openai",
    ),
    Option(
        "temperature",
        NUMBER,
        None,
        SAMPLING,
        "Sampling temperature; 0 is greedy. Example: --temperature 0.7",
        "sampling",
    ),
    Option(
        "top_p",
        NUMBER,
        None,
        SAMPLING,
        "Probability mass of nucleus sampling, in (0, 1]. Example: --top-p 0.95",
        "sampling",
    ),
    Option(
        "top_k",
        int_range(-1, 2**31),
        None,
        SAMPLING,
        "Number of likeliest tokens to sample from; -1 or 0 is all. Example: --top-k 40",
        "sampling",
    ),
    Option(
        "min_p",
        NUMBER,
        None,
        SAMPLING,
        "Least probability of a token, relative to the likeliest, in [0, 1]. Example: --min-p 0.05",
        "sampling",
    ),
    Option(
        "max_new_tokens",
        int_range(0, 2**31),
        None,
        SAMPLING,
        "Most tokens to generate per sample; the default is 128. Example: --max-new-tokens 512",
        "sampling",
    ),
    Option(
        "min_new_tokens",
        int_range(0, 2**31),
        None,
        SAMPLING,
        "Fewest tokens to generate per sample. Example: --min-new-tokens 8",
        "sampling",
    ),
    Option(
        "stop",
        TEXT,
        None,
        SAMPLING,
        "String that ends a sample; repeatable. Example: --stop END",
        "sampling",
        repeat=True,
    ),
    Option(
        "stop_token_ids",
        TOKEN_IDS,
        None,
        SAMPLING,
        "Token ids that end a sample. Example: --stop-token-ids 2,13",
        "sampling",
    ),
    Option(
        "ignore_eos",
        BOOL,
        None,
        SAMPLING,
        "Continue after the end-of-sequence token. Example: --ignore-eos",
        "sampling",
    ),
    Option(
        "no_stop_trim", BOOL, None, SAMPLING, "Keep the matched stop in the text. Example: --no-stop-trim", "sampling"
    ),
    Option(
        "skip_special_tokens",
        BOOL,
        None,
        SAMPLING,
        "Remove special tokens from the text; on by default. Example: --no-skip-special-tokens",
        "sampling",
    ),
    Option(
        "spaces_between_special_tokens",
        BOOL,
        None,
        SAMPLING,
        "Put spaces between special tokens in the text; on by default. Example: --no-spaces-between-special-tokens",
        "sampling",
    ),
    Option(
        "echo",
        BOOL,
        None,
        SAMPLING,
        "Put the text of the prompt before the generated text. Example: --echo",
        "sampling",
    ),
    Option("n", int_range(1, 2**20), None, SAMPLING, "Number of samples per prompt. Example: --n 4", "sampling"),
    Option(
        "return_logprob",
        BOOL,
        None,
        SAMPLING,
        "Write logprobs of the generated tokens. Example: --return-logprob",
        "sampling",
    ),
    Option(
        "top_logprobs_num",
        int_range(0, 2**20),
        None,
        SAMPLING,
        "Number of likeliest tokens per position whose logprobs are written. "
        "Example: --return-logprob --top-logprobs-num 5",
        "sampling",
    ),
    Option(
        "logprob_start_len",
        int_range(-1, 2**31),
        None,
        SAMPLING,
        "Write logprobs of prompt tokens from this position on; -1 is none. "
        "Example: --return-logprob --logprob-start-len 0",
        "sampling",
    ),
    Option(
        "token_ids_logprob",
        TOKEN_IDS,
        None,
        SAMPLING,
        "Token ids whose logprobs are written at every position. Example: --return-logprob --token-ids-logprob 2,13",
        "sampling",
    ),
    Option(
        "return_text_in_logprobs",
        BOOL,
        None,
        SAMPLING,
        "Write the text of each token with its logprob. Example: --return-logprob --return-text-in-logprobs",
        "sampling",
    ),
    Option(
        "return_hidden_states",
        HIDDEN_STATES,
        None,
        SAMPLING,
        "Write hidden states of all tokens, the prompt, the output or the last token, their mean, or those selected by "
        "a JSON object with `layers`, `tokens` and `pool`. Example: --return-hidden-states last",
        "sampling",
    ),
    Option(
        "return_routed_experts",
        BOOL,
        None,
        SAMPLING,
        "Write the experts selected for each token by a mixture-of-experts model. Example: --return-routed-experts",
        "sampling",
    ),
    Option(
        "best_of",
        int_range(1, 2**20),
        None,
        SAMPLING,
        "Number of samples to generate, of which the --n likeliest are kept. Example: --best-of 4",
        "sampling",
    ),
    Option(
        "frequency_penalty",
        NUMBER,
        None,
        SAMPLING,
        "Penalty subtracted from a token's logit for each time it was generated, in [-2, 2]. "
        "Example: --frequency-penalty 0.5",
        "sampling",
    ),
    Option(
        "presence_penalty",
        NUMBER,
        None,
        SAMPLING,
        "Penalty subtracted from the logits of generated tokens, in [-2, 2]. Example: --presence-penalty 0.5",
        "sampling",
    ),
    Option(
        "repetition_penalty",
        NUMBER,
        None,
        SAMPLING,
        "Factor that divides positive and multiplies negative logits of generated tokens, in (0, 2]. "
        "Example: --repetition-penalty 1.1",
        "sampling",
    ),
    choice(
        "repetition_penalty_scope",
        "output|prompt+output",
        SAMPLING,
        "Tokens that --repetition-penalty applies to: generated tokens, or prompt tokens as well (as in Hugging Face "
        "and vLLM). Example: --repetition-penalty-scope prompt+output",
        "engine",
    ),
    Option(
        "logit_bias",
        LOGIT_BIAS,
        None,
        SAMPLING,
        "Values in [-100, 100] added to the logits of tokens. Example: --logit-bias 13=-100,20=2.5",
        "sampling",
    ),
    Option(
        "bad_words",
        TEXT,
        None,
        SAMPLING,
        "String that must not be generated; repeatable. Example: --bad-words sorry",
        "sampling",
        repeat=True,
    ),
    Option(
        "allowed_token_ids",
        TOKEN_IDS,
        None,
        SAMPLING,
        "The only token ids that may be sampled. Example: --allowed-token-ids 2,13",
        "sampling",
    ),
    Option(
        "json_schema",
        JSON,
        None,
        SAMPLING,
        "JSON Schema that the text must satisfy, given as JSON or as @ and the path of a file. "
        "Example: --json-schema @person.json",
        "sampling",
    ),
    Option(
        "regex",
        NONEMPTY_TEXT,
        None,
        SAMPLING,
        "Regular expression that the whole text must match. Example: --regex '[0-9]{4}'",
        "sampling",
    ),
    Option(
        "ebnf",
        GRAMMAR,
        None,
        SAMPLING,
        "EBNF grammar that the text must follow, given as text or as @ and the path of a file. "
        "Example: --ebnf @answer.gbnf",
        "sampling",
    ),
    Option(
        "structural_tag",
        JSON,
        None,
        SAMPLING,
        "Structural tag that the text must satisfy, given as JSON or as @ and the path of a file. "
        "Example: --structural-tag @calls.json",
        "sampling",
    ),
    Option(
        "choice",
        NONEMPTY_TEXT,
        None,
        SAMPLING,
        "String that the whole text may be; repeat it for each choice. Example: --choice yes --choice no",
        "sampling",
        repeat=True,
    ),
    Option(
        "stop_regex",
        TEXT,
        None,
        SAMPLING,
        "Regular expression whose match in the output ends a sample; repeatable. Example: --stop-regex '[0-9]+'",
        "sampling",
        repeat=True,
    ),
    choice(
        "logprobs_mode",
        "raw|processed",
        SAMPLING,
        "Distribution of logprobs: the model's (raw), or the one sampled from, after penalties, masks and filters "
        "(processed). Example: --logprobs-mode processed",
        "engine",
    ),
    Option(
        "logit_processor",
        NAME_FUNCTION,
        (),
        SAMPLING,
        "Python function that rows select by NAME in `custom_logit_processor`; repeatable. "
        "Example: --logit-processor calm=my_module:calm",
        "engine",
        repeat=True,
    ),
    Option(
        "custom_logit_processor",
        NAME,
        None,
        SAMPLING,
        "Name of the --logit-processor to apply to rows. Example: --custom-logit-processor calm",
        "sampling",
    ),
    Option(
        "custom_params",
        JSON,
        None,
        SAMPLING,
        "Parameters of --custom-logit-processor: a JSON object, given as JSON or as @ and the path of a file. "
        "Example: --custom-params '{\"strength\": 2}'",
        "sampling",
    ),
    Option(
        "lora_path",
        NAME,
        None,
        SAMPLING,
        "Name of the --lora adapter to apply to rows. Example: --lora-path fr",
        "sampling",
    ),
    Option(
        "stream",
        BOOL,
        None,
        SAMPLING,
        "Write an event for each token of rows to --events. Example: --events events.jsonl --stream",
        "sampling",
    ),
    Option(
        "stop_on_repeat",
        int_range(4, 2**20),
        None,
        SAMPLING,
        "End a sample whose last N tokens repeat a block of at most N/4 tokens, with finish_reason repetition; off by "
        "default. Example: --stop-on-repeat 64",
        "engine",
    ),
    flag(
        "lenient_schemas",
        SAMPLING,
        "Ignore JSON Schema keywords that cannot be enforced instead of refusing the row. Example: --lenient-schemas",
        "engine",
    ),
)
