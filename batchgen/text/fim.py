"""Fill-in-the-middle prompts: a prefix and a suffix in the layout of each family of code models (`families.toml`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchgen.request.fields.params import SamplingParams
from batchgen.text.families import TABLES
from batchgen.text.tokens.tokenizer import Tokenizer

_PREFIX, _SUFFIX = "prefix", "suffix"


_SEPARATOR = "☺"
"""Encoded in front of a text whose tokens must not be those of a text's beginning."""


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
        bos = (
            self.tokenizer.prefix_ids
            if list(ids[: len(self.tokenizer.prefix_ids)]) == self.tokenizer.prefix_ids
            else []
        )
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
