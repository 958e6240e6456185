"""The prompt of a row in each form that it may be given.

Nothing here knows of files or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ChatPrompt", "EmbedsPrompt", "Prompt", "StoredPrompt", "TextPrompt", "TokenPrompt"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt given as text; gets the tokenizer's BOS unless it begins with it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids, taken as they are."""

    ids: tuple[int, ...]


class ChatPrompt(NamedTuple):
    """A conversation; the chat template renders and tokenises it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPrompt:
    """A prompt given as token embeddings."""

    source: npt.NDArray[np.float32] | str
    """[P, H], or the name of such a tensor in a file."""


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt whose embeddings stand in the table's `EmbedsStore`."""

    first: int
    """The row at which they begin."""
    length: int
    """Tokens, P."""

    def cut(self, keep: int, side: Literal["none", "left", "right"]) -> StoredPrompt:
        """What `keep` tokens of it leave where the others are dropped on `side`."""
        return StoredPrompt(self.first + (self.length - keep if side == "left" else 0), keep)


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt | StoredPrompt
