"""Fitting prompts into the context: which are refused, and what truncation keeps of the others."""

from __future__ import annotations

from typing import Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.prompts import Prompt, StoredPrompt, TokenPrompt
from batchgen.text.tokens.tokenizer import Tokenizer

Truncate = Literal["none", "left", "right"]

_DEFAULT_NEW_TOKENS = 128  # room for the output of a truncated prompt whose row sets no `max_new_tokens`


class PromptFitter:
    """Fits the prompts of a run into the context, and counts those that it truncates.

    A prompt is truncated only if it leaves no room for a token. It is then cut to leave room for `max_new_tokens` (128
    if the row sets no limit), but for at most half the context. `left` drops the beginning, `right` the end; a BOS in
    front of text or a conversation is kept.

    Args:
        tokenizer: the model's tokenizer.
        context_length: most tokens of prompt and output together.
        truncate: side on which prompts that are too long are cut, "none" to refuse them.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int, truncate: Truncate) -> None:
        self._tokenizer = tokenizer
        self._context = context_length
        self._truncate = truncate
        self.truncated = 0
        """Number of prompts that were truncated."""

    def fit(self, prompt: Prompt, ids: list[int], max_new_tokens: int | None) -> list[int]:
        """`ids`, truncated if they fill the context and truncation is allowed.

        Raises:
            RowError: `context_length_exceeded`, with both numbers.
        """
        keep = self.kept_length(len(ids), max_new_tokens)
        if keep >= len(ids):
            return ids
        return self._cut(prompt, ids, keep)

    def fit_scored(self, prompt: Prompt, ids: list[int], start: int) -> list[int]:
        """The prompt's part of `ids`, truncated if prompt and text exceed the context and truncation is allowed.

        Raises:
            RowError: `context_length_exceeded`, with all numbers.
        """
        keep = self._context - (len(ids) - start)
        if start <= keep:
            return ids[:start]
        if self._truncate == "none" or keep < 1:
            message = (
                f"the prompt has {start} tokens, the text to score {len(ids) - start}, and the context is "
                f"{self._context}; shorten them, or allow --truncate left or right"
            )
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
        return self._cut(prompt, ids[:start], keep)

    def _cut(self, prompt: Prompt, ids: list[int], keep: int) -> list[int]:
        """`ids` cut to `keep` tokens on the side that `truncate` names.

        Raises:
            RowError: `context_length_exceeded`: the prompt has media, which cannot be cut.
        """
        if getattr(prompt, "media", ()):
            raise self.too_long(
                f"has {len(ids)} tokens with its images and sounds", "a prompt with media is not cut: shorten it"
            )
        self.truncated += 1
        if self._truncate == "right":
            return ids[:keep]
        bos = self._tokenizer.prefix_ids
        is_ids = isinstance(prompt, TokenPrompt | StoredPrompt)
        kept = bos if not is_ids and ids[: len(bos)] == bos and len(bos) < keep else []
        return kept + ids[len(ids) - (keep - len(kept)) :]

    def kept_length(self, count: int, max_new_tokens: int | None) -> int:
        """Number of a prompt's `count` tokens that truncation keeps.

        Raises:
            RowError: `context_length_exceeded`, with both numbers.
        """
        if count < self._context:
            return count
        if self._truncate == "none" or self._context < 2:
            raise self.too_long(f"has {count} tokens", "shorten it, or allow --truncate left or right")
        wanted = _DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return self._context - max(1, min(wanted, self._context // 2))

    def too_long(self, size: str, remedy: str) -> RowError:
        """The `context_length_exceeded` error of a prompt; `size`: such as "has 9 tokens"."""
        message = f"the prompt {size}, and the context is {self._context}, which leaves no room"
        return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message} to generate; {remedy}")
