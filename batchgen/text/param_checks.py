"""Checks of sampling parameters against a model: its vocabulary, its format of thoughts, its grammar compiler.

A string of `bad_words` is banned with and without a leading space, so `foo` and ` foo` ban the same sequences. The form
without a space is also encoded after a line break, since some tokenizers put a space in front of every text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from batchgen.errors import ErrorCode, RowError
from batchgen.request import checks
from batchgen.request.checks import invalid, out_of_range
from batchgen.request.fields.params import SAMPLING_FIELDS, SamplingParams
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.prompt_texts import calls
from batchgen.text.reasoning import ReasoningParser
from batchgen.text.stops.hidden_stops import check_stops
from batchgen.text.tokens.tokenizer import Tokenizer

_ID_FIELDS: Final = tuple(f.name for f in SAMPLING_FIELDS if f.check in (checks.ids, checks.nonempty_ids))
_LINE_BREAK: Final = "\n"


def check_params(
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab_size: int,
    grammars: Grammars,
    reasoning: ReasoningParser | None,
) -> None:
    """Check a row's parameters against its model.

    Args:
        params: the parameters.
        tokenizer: the model's tokenizer.
        vocab_size: size of the model's vocabulary.
        grammars: where the constraint was compiled.
        reasoning: the model's format of thoughts, if it has one that is known.

    Raises:
        RowError: `token_out_of_range`, `invalid_field`, `unsupported_field`, or the constraint's error.
    """
    constraint = params.constraint
    error = grammars.error(constraint) if constraint is not None else None
    if error is not None:
        raise RowError(error.code, error.message, error.param)
    for name in _ID_FIELDS:
        ids = getattr(params, name)
        if ids and max(ids) >= vocab_size:
            raise out_of_range(name, next(token for token in ids if token >= vocab_size), vocab_size)
    if params.logit_bias and params.logit_bias[-1][0] >= vocab_size:
        raise out_of_range("logit_bias", params.logit_bias[-1][0], vocab_size)
    if params.bad_words:
        _check_bad_words(params.bad_words, tokenizer, vocab_size)
    _check_reasoning(params, reasoning)
    check_stops(params, tokenizer)
    if params.top_logprobs_num > vocab_size:
        problem = f"must not exceed the vocabulary ({vocab_size}), got {params.top_logprobs_num}"
        raise RowError(ErrorCode.INVALID_FIELD, f"`top_logprobs_num` {problem}", "top_logprobs_num")


def _check_reasoning(params: SamplingParams, reasoning: ReasoningParser | None) -> None:
    """Check that fields about thoughts can be obeyed."""
    asked = {
        "separate_reasoning": bool(params.separate_reasoning),
        "thinking_budget": params.thinking_budget is not None,
    }
    for name in (name for name, value in asked.items() if value and reasoning is None):
        message = (
            f"`{name}` needs a model whose format of thoughts is known, and neither the tokenizer nor the chat "
            "template of this one names it; name its family with --reasoning, or leave it out"
        )
        raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, name)
    if params.constrain_reasoning and params.constraint is None:
        raise invalid("constrain_reasoning", "needs a constraint; leave it out")
    if params.thinking_budget is not None and params.constraint is not None and params.constrains_all:
        problem = "cannot end thoughts inside a constraint on the whole text; let it hold for the answer alone"
        raise invalid("thinking_budget", f"{problem}, with `separate_reasoning` and without `constrain_reasoning`")


@lru_cache(maxsize=64)  # an error is not remembered
def _check_bad_words(words: tuple[str | tuple[int, ...], ...], tokenizer: Tokenizer, vocab_size: int) -> None:
    largest = max((max(word) for word in words if not isinstance(word, str)), default=0)
    if largest >= vocab_size:
        raise out_of_range("bad_words", largest, vocab_size)
    bad_word_sequences(words, tokenizer, vocab_size)


def bad_word_sequences(
    words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Distinct id sequences that spell `words`, in order, without those that hold ids past the vocabulary.

    Raises:
        RowError: `invalid_field` for a string that gives no tokens.
    """
    texts = [text for word in words if isinstance(word, str) for text in _spellings(word)]
    encoded = iter([ids for call in calls([_LINE_BREAK, *texts]) for ids in tokenizer.encode_plain(call)])
    line_break = next(encoded)
    distinct: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            distinct[word] = None
            continue
        plain, after_break, *spaced = (next(encoded) for _ in _spellings(word))
        sequences = [plain, *spaced]
        if after_break[: len(line_break)] == line_break:
            sequences.append(after_break[len(line_break) :])
        if not any(sequences):
            problem = f"holds {word!r}, which gives no tokens; remove it"
            raise RowError(ErrorCode.INVALID_FIELD, f"`bad_words` {problem}", "bad_words")
        distinct.update((tuple(ids), None) for ids in sequences if ids)
    return tuple(ids for ids in distinct if max(ids) < vocab_size)


def _spellings(word: str) -> tuple[str, ...]:
    """The word alone, after a line break and after a space; a word of spaces alone has no third spelling."""
    bare = word.lstrip(" ")
    return (bare, _LINE_BREAK + bare, " " + bare) if bare else (word, _LINE_BREAK + word)
