"""Token ids of prompts followed by the texts to score (`completion`, `completions`).

A prompt that is text is tokenized together with the text to score. The prompt ends with the last token that ends inside
it: a token that straddles the border belongs to the text to score. Ids given by the row are concatenated unchanged, and
so is text after a prompt of ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchgen.errors import ErrorCode, RowError
from batchgen.text.prompt_texts import calls
from batchgen.text.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptWithText:
    """Token ids of a prompt and a text to score, without the BOS that the tokenizer adds."""

    ids: list[int]
    start: int
    """Index in `ids` of the first token to score."""


def join_texts(
    tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], texts: Sequence[str | tuple[int, ...]]
) -> Iterator[PromptWithText]:
    """The prompt followed by each of the texts, in order; texts are tokenised some at a time.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's text; None for a prompt given as ids.
        prompt_ids: ids of the prompt alone.
        texts: texts to score, as strings or ids.

    Raises:
        RowError: `invalid_field` for a text that has no tokens or cannot be tokenized.
    """
    name = scored_field(texts)
    encoded = _encoded(tokenizer, prompt, prompt_ids, [text for text in texts if isinstance(text, str)])
    for text in texts:
        try:
            joined = next(encoded) if isinstance(text, str) else PromptWithText([*prompt_ids, *text], len(prompt_ids))
        except Exception as error:  # the Rust side raises plain Exception
            raise RowError(
                ErrorCode.INVALID_FIELD, f"`{name}` cannot be tokenized: {error.__cause__ or error}", name
            ) from None
        if joined.start == len(joined.ids):
            problem = f"`{name}` holds a text without tokens; give it some or drop it"
            raise RowError(ErrorCode.INVALID_FIELD, problem, name)
        yield joined


def _encoded(
    tokenizer: Tokenizer, prompt: str | None, prompt_ids: list[int], strings: Sequence[str]
) -> Iterator[PromptWithText]:
    for call in calls(strings, len(prompt or "")):
        if prompt is None:
            yield from (PromptWithText(prompt_ids + ids, len(prompt_ids)) for ids in tokenizer.encode_plain(call))
        else:
            yield from (PromptWithText(ids, start) for ids, start in tokenizer.encode_continuations(prompt, call))


def scored_field(texts: Sequence[str | tuple[int, ...]]) -> str:
    """Name of the row's field that holds the texts to score."""
    return "completion" if len(texts) == 1 else "completions"
