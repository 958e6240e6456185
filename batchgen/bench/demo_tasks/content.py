"""A question with its exact answer, its split, and the words and templates of `data.toml` that questions are made of.

Independent of chat templates, tokens and models.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_DATA = tomllib.loads(Path(__file__).with_name("data.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {name: text.split() for name, text in _DATA["words"].items()}
PAIRS = {name: dict(pair.split(":") for pair in text.split()) for name, text in _DATA["pairs"].items()}
CATEGORIES: dict[str, list[str]] = {name: text.split() for name, text in _DATA["categories"].items()}
TOPICS: dict[str, dict[str, list[str]]] = _DATA["topics"]
TEMPLATES: dict[str, list[str]] = _DATA["templates"]
SORT: dict[str, list[str]] = _DATA["sort"]
"""Order -> templates of sorting questions."""
FACTS: dict[str, list[str]] = _DATA["facts"]
"""Kind of fact -> templates of questions about a word."""
SENTENCES: dict[str, list[str]] = _DATA["sentences"]
"""Kind of sentence -> templates that fields are extracted from."""
PASSAGES: dict[str, dict[str, list[str]]] = _DATA["passages"]
"""Kind of fact -> templates of statements, and of questions about the value and about the name."""

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
