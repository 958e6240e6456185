"""Advice: what is probably not as the author of a job means it, from its counts, each with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np

from batchgen.config.python_words import in_python
from batchgen.errors import AdviceWarning
from batchgen.request.completion import AnswerCounts
from batchgen.request.table.request_table import RequestTable
from batchgen.text.families import MARKERS
from batchgen.text.tokens.tokenizer import Tokenizer

_LOOKED_AT = 10_000
"""Most prompts whose tokens are looked at."""
_SEVERAL = 3
"""Fewest prompts, or answers, of which it says something that all are equal."""
_FEW = 8
"""Answers of a trial, of which the most may well be cut."""
_ROWS = 256
"""Prompts that are compared at once."""
_TAIL = 16
"""Tokens of a prompt's end that may hold the marker of an open thought."""
_TAILS = 64
"""Most different ends of prompts that are decoded."""


def input_advice(table: RequestTable, tokenizer: Tokenizer, *, is_plain: bool, truncated: int = 0) -> list[str]:
    """Advice on the rows of a job, before anything is generated.

    `is_plain`: whether every good row is plain text, which is not said to be meant; `truncated`: number of prompts that
    were cut.
    """
    plain = _plain_text(table, tokenizer) if is_plain else None
    checks = (plain, _doubled_bos(table, tokenizer), _equal_prompts(table), _truncated(truncated, table))
    return [line for line in (*checks, _open_thought(table, tokenizer)) if line is not None]


def output_advice(counts: AnswerCounts, table: RequestTable) -> list[str]:
    """Advice on the results of a whole job."""
    return [*_empty_texts(counts, table), *_equal_texts(counts, table), *_limited(counts, table)]


def warn_advice(lines: Iterable[str], given: set[str]) -> None:
    """Warn the caller of `Engine.generate` with advice; `given`: lines that were given, to which it adds its own."""
    for line in lines:
        if line not in given:
            given.add(line)
            warnings.warn(in_python(line), AdviceWarning, stacklevel=5)


def _plain_text(table: RequestTable, tokenizer: Tokenizer) -> str | None:
    """Only plain text for a model with a chat template, none of which writes out the template's special tokens."""
    if tokenizer.template is None:
        return None
    special = np.array(sorted(tokenizer.special_ids - set(tokenizer.prefix_ids)), np.int64)
    offsets = table.offsets[: _LOOKED_AT + 1]
    if np.isin(table.tokens[: offsets[-1]], special).any():
        return None
    return (
        "every row is plain text, and the model has a chat template: an instruction-tuned model answers better to "
        "`messages` or with --chat (--no-chat says that plain text is meant)"
    )


def _doubled_bos(table: RequestTable, tokenizer: Tokenizer) -> str | None:
    prefix = tokenizer.prefix_ids
    if not prefix:
        return None
    starts = table.offsets[:-1][np.diff(table.offsets) > 1]
    tokens = table.tokens
    count = int(((tokens[starts] == prefix[0]) & (tokens[starts + 1] == prefix[0])).sum())
    if not count:
        return None
    return (
        f"{count:,} of {len(table):,} prompts begin with two BOS tokens: leave the BOS out of the text of a "
        "message, or of `input_ids`"
    )


def _are_equal(table: RequestTable) -> bool:
    """Whether all prompts have the same tokens and adapter."""
    lengths = np.diff(table.offsets)
    if not len(table) or table.embeds_id is not None or (lengths != lengths[0]).any():
        return False
    prompts, adapters = table.tokens.reshape(len(table), -1), {each.lora_path for each in table.params}
    same = ((prompts[at : at + _ROWS] == prompts[0]).all() for at in range(0, len(prompts), _ROWS))
    return len(adapters) == 1 and all(same)


def _equal_prompts(table: RequestTable) -> str | None:
    if len(table) < _SEVERAL or (table.score_start >= 0).any() or not _are_equal(table):
        return None
    return (
        f"all {len(table):,} prompts are equal: for more samples of one prompt set `n`, or name the column that the "
        "prompt is in with --prompt-column"
    )


def _truncated(count: int, table: RequestTable) -> str | None:
    cut = f"{count:,} of {len(table):,} prompts were cut by --truncate"
    return f"{cut}: shorten them, or raise --max-model-len if the model allows it" if count else None


def _open_thought(table: RequestTable, tokenizer: Tokenizer) -> str | None:
    """Rows whose prompt ends inside a thought, and whose constraint holds for the thought, too."""
    whole = np.array([each.constraint is not None and each.constrains_all for each in table.params], np.bool_)
    requests = np.flatnonzero(whole[table.params_id[:_LOOKED_AT]])
    if not len(requests):
        return None
    tails = {_tail(table, request): None for request in requests.tolist()}
    texts = {tail: tokenizer.decode(list(tail), skip_special_tokens=False) for tail in list(tails)[:_TAILS]}
    opened = {tail for tail, text in texts.items() if any(text.rfind(a) > text.rfind(b) for a, b in MARKERS)}
    count = sum(_tail(table, request) in opened for request in requests.tolist())
    if not count:
        return None
    return (
        f"{count:,} rows with a constraint begin inside an open thought, which the constraint forces into its form: "
        "set `separate_reasoning` to true, for a constraint on the answer alone, or turn thinking off in "
        "`chat_template_kwargs`"
    )


def _tail(table: RequestTable, request: int) -> tuple[int, ...]:
    return tuple(table.prompt_ids(request)[-_TAIL:].tolist())


def _empty_texts(counts: AnswerCounts, table: RequestTable) -> Iterator[str]:
    if counts.empty_texts:
        empty = f"{counts.empty_texts:,} of {counts.answers:,} answers are empty: the model ended "
        if any(each.separate_reasoning for each in table.params):
            yield f"{empty}in its thoughts, or at once; raise `max_new_tokens`, or set `thinking_budget` below it"
        else:
            yield (
                f"{empty}at once; look at the prompt as the model sees it with `batchgen check`, or set "
                "`min_new_tokens`"
            )


def _equal_texts(counts: AnswerCounts, table: RequestTable) -> Iterator[str]:
    """One text for all prompts, which differ."""
    if _SEVERAL <= counts.answers == counts.equal_texts and counts.first_text and not _are_equal(table):
        yield (
            f"all {counts.answers:,} answers are equal, and the prompts are not: look at what the model sees with "
            "`batchgen check`, or --include-prompt for all rows"
        )


def _limited(counts: AnswerCounts, table: RequestTable) -> Iterator[str]:
    """Most answers are cut at their limit although they could have ended before it."""
    free = table.by_params([not p.runs_to_limit for p in table.params], np.bool_) & (table.max_new_tokens > 1)
    count = counts.finish_reasons["length"]
    if counts.answers >= _FEW and 2 * count > counts.answers and 2 * int(free.sum()) > len(table):
        yield (
            f"{count:,} of {counts.answers:,} answers were cut at their token limit: raise --max-new-tokens (the "
            "default is 128), or give a `stop`"
        )
