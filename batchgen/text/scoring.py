"""Prompts with the texts to score behind them, as ids.

A text is tokenised together with a prompt that is text, since that is how a model meets both; the prompt's part ends
with the last token that ends inside it, so that a token which straddles the border belongs to the text to score. Ids
that were given are joined as they are, and so is text behind a prompt of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.errors import ErrorCode, RowError
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Joined", "join_texts", "texts_field"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A prompt and a text to score, without what the tokenizer puts in front of raw text."""

    ids: list[int]
    start: int
    """Where the text begins in `ids`."""


def join_texts(
    tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], texts: Sequence[str | tuple[int, ...]]
) -> list[Joined]:
    """The prompt with each of the texts.

    Args:
        tokenizer: the model's.
        prompt: the prompt's text; None for one given as ids.
        prompt_ids: its ids alone.
        texts: what is to be scored.

    Raises:
        RowError: `invalid_field` for a text without tokens of its own, or one that cannot be tokenised.
    """
    strings = [text for text in texts if isinstance(text, str)]
    try:
        if prompt is None:
            plain = tokenizer.encode_plain(strings) if strings else []
            encoded = iter([Joined(prompt_ids + ids, len(prompt_ids)) for ids in plain])
        else:
            split = tokenizer.encode_behind(prompt, strings) if strings else []
            encoded = iter([Joined(ids, start) for ids, start in split])
    except Exception as error:  # the Rust side raises plain Exception
        name = texts_field(texts)
        raise RowError(ErrorCode.INVALID_FIELD, f"`{name}` cannot be tokenised: {error}", name) from None
    joined = [
        next(encoded) if isinstance(text, str) else Joined([*prompt_ids, *text], len(prompt_ids)) for text in texts
    ]
    if any(item.start == len(item.ids) for item in joined):
        name = texts_field(texts)
        raise RowError(ErrorCode.INVALID_FIELD, f"`{name}` holds a text without tokens; give it some or drop it", name)
    return joined


def texts_field(texts: Sequence[str | tuple[int, ...]]) -> str:
    """The field that such texts stand in."""
    return "completion" if len(texts) == 1 else "completions"
