"""One question with its exact answer, and the split that it belongs to. Knows nothing of chat, tokens or models."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 16


@dataclass(frozen=True, slots=True)
class Content:
    """A question before it is wrapped as a chat turn or as bare text.

    Attributes:
        prompt: the question as a user would ask it in a chat.
        raw: the same question as bare text that a language model continues; the answer follows after one space.
        answer: the exact answer, without surrounding white space.
        key: what is asked for. The split is decided by the key alone, so nothing with one key stands on both sides.
            Where the answer follows from the question, the key leaves the wording out; for lists of facts, which can
            only be known by heart, it is the wording.
    """

    prompt: str
    raw: str
    answer: str
    key: str


def split_of(key: str) -> Split:
    """The split that a content key belongs to, by its SHA-256: one key in sixteen is held out."""
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"
