"""Fill-in-the-middle: prompts of two sides around a hole, as each family of code models was trained to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchgen.params import SamplingParams
from batchgen.text.tokenizer import Tokenizer

__all__ = ["FillInTheMiddle", "find_fim"]

_PREFIX, _SUFFIX = "prefix", "suffix"


@dataclass(frozen=True, slots=True)
class _Family:
    """How one family spells a prompt."""

    layout: tuple[str, ...]
    """Special tokens in their order, with the places of the two sides between them."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle beside the layout's own and the end of sequence, where the vocabulary has them."""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(part for part in self.layout if part not in (_PREFIX, _SUFFIX))


_FAMILIES = (
    # Qwen2.5-Coder and CodeGemma
    _Family(
        ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2 and Granite Code; SantaCoder
    _Family(
        ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    _Family(("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"), ("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder
    _Family(("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"), ("<|EOT|>",)),
    # CodeLlama
    _Family(("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"), ("▁<EOT>",)),
    # Codestral and other Mistral models, which read the end first
    _Family(("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX), ("[MIDDLE]",)),
)

_SIGN = "☺"
"""Stands before a text whose tokens must not be those of a text's beginning."""


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """The layout of one tokenizer's family, in token ids."""

    tokenizer: Tokenizer
    layout: tuple[int | str, ...]
    end_ids: tuple[int, ...]
    """Ids that end the middle."""

    def params(self, params: SamplingParams) -> SamplingParams:
        """`params` of a row whose suffix stands in its prompt: the family's end tokens stop it, with `ignore_eos` those
        alone that are no end of sequence.
        """
        ignored = self.tokenizer.eos_ids if params.ignore_eos else frozenset()
        ends = dict.fromkeys((*params.stop_token_ids, *(token for token in self.end_ids if token not in ignored)))
        return replace(params, suffix=None, stop_token_ids=tuple(ends))

    def suffix_ids(self, text: str) -> list[int]:
        """Ids of what follows the hole: where the tokenizer puts a space before a text, without that."""
        ids = self.tokenizer.encode_plain([text])[0]
        if not ids or not (self.tokenizer.id_to_token(ids[0]) or "").startswith("▁"):
            return ids
        sign, both = self.tokenizer.encode_plain([_SIGN, _SIGN + text])
        return both[len(sign) :] if both[: len(sign)] == sign else ids

    def prompt(
        self, ids: Sequence[int], suffix: Sequence[int], keep: int, truncate: Literal["none", "left", "right"]
    ) -> list[int]:
        """The prompt around the hole, the tokenizer's BOS in front if `ids` begins with it.

        Args:
            ids: before the hole.
            suffix: behind it.
            keep: most tokens to return, if `truncate` says on which side to drop what is farthest from the hole; that
                side's text goes first, then the other's.
            truncate: "none" drops nothing.
        """
        bos = (
            self.tokenizer.prefix_ids
            if list(ids[: len(self.tokenizer.prefix_ids)]) == self.tokenizer.prefix_ids
            else []
        )
        before, after = list(ids[len(bos) :]), list(suffix)
        marks = sum(isinstance(part, int) for part in self.layout)
        surplus = len(bos) + marks + len(before) + len(after) - keep
        if truncate != "none" and surplus > 0:
            first = min(surplus, len(before) if truncate == "left" else len(after))
            from_before, from_after = (first, surplus - first) if truncate == "left" else (surplus - first, first)
            before, after = before[from_before:], after[: max(0, len(after) - from_after)]
        found = bos.copy()
        for part in self.layout:
            found += [part] if isinstance(part, int) else before if part == _PREFIX else after
        return found


def find_fim(tokenizer: Tokenizer, vocab_size: int) -> FillInTheMiddle | None:
    """How this tokenizer's model fills in the middle, known by its vocabulary; None where it cannot.

    `vocab_size` is the model's.
    """

    def known(names: Sequence[str]) -> dict[str, int]:
        ids = {name: tokenizer.token_to_id(name) for name in names}
        return {name: token for name, token in ids.items() if token is not None and token < vocab_size}

    for family in _FAMILIES:
        marks = known(family.marks)
        if len(marks) == len(family.marks):
            layout = tuple(marks.get(part, part) for part in family.layout)
            ends = (*marks.values(), *known(family.ends).values())
            return FillInTheMiddle(tokenizer, layout, tuple(sorted(set(ends))))
    return None
