"""A question with its exact answer, and its split. Independent of chat templates, tokens and models."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 16
"""One of this many content keys is held out."""


@dataclass(frozen=True, slots=True)
class Content:
    """A question with its answer, independent of whether it is put as a chat turn or as plain text.

    Attributes:
        prompt: the question as a user asks it in a chat.
        raw: the same question as plain text to continue; the answer follows after one space.
        answer: the exact answer, without surrounding white space.
        key: identity of the question, which alone decides the split: both splits never contain the same key. If the
            answer can be derived from the question, the key does not depend on the wording; for facts, which can only
            be memorised, it is the wording.
    """

    prompt: str
    raw: str
    answer: str
    key: str


def split_of(key: str) -> Split:
    """Split of a content key, from its SHA-256 digest: one key in `HELDOUT_ONE_IN` is held out."""
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"
