"""Fitting prompts into the context: which are refused, and what truncation keeps of the others.

Prompts to fill in the middle have a prefix and a suffix in the layout of a family of code models (`families.toml`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import TokenIds
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import Prompt, StoredPrompt, TokenPrompt
from batchgen.text.families import TABLES
from batchgen.text.tokens.tokenizer import Tokenizer

Truncate = Literal["none", "left", "right"]
Ids = list[int] | TokenIds
"""Ids of a prompt: of a text, or as the row gives them."""

_PREFIX, _SUFFIX = "prefix", "suffix"
_SEPARATOR = "☺"
"""Encoded in front of a text whose tokens must not be those of a text's beginning."""
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
        reason: why the context ends before the model's own does, so that rows past it are refused; empty: it does not.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int, truncate: Truncate, reason: str = "") -> None:
        self._tokenizer = tokenizer
        self._context = context_length
        self._truncate = truncate
        self._reason = reason
        self.context = f"the context is {context_length}" + (f" ({reason})" if reason else "")
        """The context in words, for messages."""
        self.truncated = 0
        """Number of prompts that were truncated."""

    def fit(self, prompt: Prompt, ids: Ids, max_new_tokens: int | None) -> Ids:
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

        The last token of a text is scored by those before it, so it may be one past the context.

        Raises:
            RowError: `context_length_exceeded`, with all numbers.
        """
        keep = self._context - (len(ids) - start)
        if start <= keep + 1:
            return ids[:start]
        if self._truncate == "none" or keep < 1:
            message = (
                f"the prompt has {start} tokens, the text to score {len(ids) - start}, and {self.context}; "
                "shorten them, or allow --truncate left or right"
            )
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
        return list(self._cut(prompt, ids[:start], keep))

    def fit_task(self, prompt: Prompt, ids: Ids, room: int, query: Sequence[int] = ()) -> tuple[Sequence[int], Ids]:
        """A query and `ids`, truncated to `room` tokens together if they have more and truncation is allowed.

        Of a query and a document the longer one is cut at its end, then both alike.

        Raises:
            RowError: `context_length_exceeded`, with both numbers.
        """
        total = len(query) + len(ids)
        if total <= room:
            return query, ids
        if self._truncate == "none" or room < 1:
            message = f"the prompt has {total} tokens, and a row of this checkpoint at most {room} next to special ones"
            remedy = "shorten it, or allow --truncate left or right"
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message}; {remedy}")
        if not query:
            return query, self._cut(prompt, ids, room)
        self.truncated += 1
        least = min(len(query), len(ids))
        if 2 * least > room:
            least = room // 2
        kept = (least, room - least) if len(query) <= len(ids) else (room - least, least)
        return query[: kept[0]], ids[: kept[1]]

    def _cut(self, prompt: Prompt, ids: Ids, keep: int) -> Ids:
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
        rest = ids[len(ids) - (keep - len(kept)) :]
        return [*kept, *rest] if kept else rest

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

    def new_tokens(self, count: int, max_new_tokens: int | None) -> int:
        """Most tokens to generate after a prompt of `count` tokens, cut to the context.

        Raises:
            RowError: `context_length_exceeded`: they are past a context that ends before the model's own does.
        """
        room = self._context - count
        if max_new_tokens is not None and max_new_tokens > room and self._reason:
            message = f"the prompt has {count} tokens, `max_new_tokens` is {max_new_tokens}, and {self.context}"
            raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message}; give less", "max_new_tokens")
        return room if max_new_tokens is None else min(max_new_tokens, room)

    def too_long(self, size: str, remedy: str) -> RowError:
        """The `context_length_exceeded` error of a prompt; `size`: such as "has 9 tokens"."""
        message = f"the prompt {size}, and {self.context}, which leaves no room"
        return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{message} to generate; {remedy}")


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """Fill-in-the-middle layout of one tokenizer, in token ids."""

    tokenizer: Tokenizer
    layout: tuple[int | str, ...]
    """Ids of special tokens, with `_PREFIX` and `_SUFFIX` where the two sides go."""
    end_ids: tuple[int, ...]
    """Token ids that end the middle."""

    def params(self, params: SamplingParams) -> SamplingParams:
        """Parameters of a row whose suffix is part of its prompt: the family's end tokens stop it.

        With `ignore_eos` end-of-sequence ids are left out of them.
        """
        ignored = self.tokenizer.eos_ids if params.ignore_eos else frozenset()
        stop_ids = dict.fromkeys((*params.stop_token_ids, *(token for token in self.end_ids if token not in ignored)))
        return replace(params, suffix=None, stop_token_ids=tuple(stop_ids))

    def suffix_ids(self, text: str) -> list[int]:
        """Ids of the suffix, without the space that some tokenizers put in front of a text."""
        ids = self.tokenizer.encode_plain([text])[0]
        if not ids or not (self.tokenizer.id_to_token(ids[0]) or "").startswith("▁"):
            return ids
        separator, both = self.tokenizer.encode_plain([_SEPARATOR, _SEPARATOR + text])
        return both[len(separator) :] if both[: len(separator)] == separator else ids

    def prompt(
        self, ids: Sequence[int], suffix: Sequence[int], keep: int, truncate: Literal["none", "left", "right"]
    ) -> list[int]:
        """Token ids of the whole prompt, with the tokenizer's BOS in front if `ids` begins with it.

        Args:
            ids: ids before the middle.
            suffix: ids after the middle.
            keep: most tokens to return, unless `truncate` is "none".
            truncate: side to drop first, "left" the prefix, "right" the suffix, then the other; the tokens farthest
                from the middle go first. "none" drops nothing.
        """
        prefix = self.tokenizer.prefix_ids
        bos = prefix if list(ids[: len(prefix)]) == prefix else []
        before, after = list(ids[len(bos) :]), list(suffix)
        special = sum(isinstance(part, int) for part in self.layout)
        surplus = len(bos) + special + len(before) + len(after) - keep
        if truncate != "none" and surplus > 0:
            first = min(surplus, len(before) if truncate == "left" else len(after))
            from_before, from_after = (first, surplus - first) if truncate == "left" else (surplus - first, first)
            before, after = before[from_before:], after[: max(0, len(after) - from_after)]
        whole = bos.copy()
        for part in self.layout:
            whole += [part] if isinstance(part, int) else before if part == _PREFIX else after
        return whole


def find_fim(tokenizer: Tokenizer, vocab_size: int) -> FillInTheMiddle | None:
    """Layout of the family that the tokenizer's vocabulary belongs to; None where it has no such special tokens.

    `vocab_size` is the model's: special tokens past it do not count.
    """

    def ids_of(names: Sequence[str]) -> dict[str, int]:
        ids = {name: tokenizer.token_to_id(name) for name in names}
        return {name: token for name, token in ids.items() if token is not None and token < vocab_size}

    for family in TABLES["fim"]:
        names = [part for part in family["layout"] if part not in (_PREFIX, _SUFFIX)]
        special = ids_of(names)
        if len(special) == len(names):
            layout = tuple(special.get(part, part) for part in family["layout"])
            end_ids = (*special.values(), *ids_of(family["ends"]).values())
            return FillInTheMiddle(tokenizer, layout, tuple(sorted(set(end_ids))))
    return None
