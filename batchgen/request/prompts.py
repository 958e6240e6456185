"""Forms of a prompt: text, token ids, a conversation, or embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ChatPrompt", "EmbedsPrompt", "Prompt", "StoredPrompt", "TextPrompt", "TokenPrompt"]


class TextPrompt(NamedTuple):
    """A prompt given as text; the tokenizer's BOS is added unless the text begins with it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids, used unchanged."""

    ids: tuple[int, ...]


class ChatPrompt(NamedTuple):
    """A conversation, rendered by the chat template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPrompt:
    """A prompt given as token embeddings."""

    source: npt.NDArray[np.float32] | str
    """[P, H] embeddings, or the name of such a tensor in a file."""


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose embeddings are in the table's `EmbedsStore`."""

    first: int
    """Index of the first row in the store."""
    length: int
    """Number of tokens, P."""

    def cut(self, keep: int, side: Literal["none", "left", "right"]) -> StoredPrompt:
        """The prompt truncated to `keep` tokens, dropping the others on `side`."""
        return StoredPrompt(self.first + (self.length - keep if side == "left" else 0), keep)


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt | StoredPrompt
