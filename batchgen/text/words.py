"""Words that must not be generated, as the sequences of ids that would spell them.

A string stands for itself without and with a space in front: `foo` and ` foo` name the same two. "Without" is what the
tokenizer makes of the word behind a line break, too, since some put a space of their own in front of every text.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.errors import ErrorCode, RowError
from batchgen.text.tokenizer import Tokenizer

__all__ = ["bad_sequences"]

_BREAK = "\n"


def bad_sequences(
    words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Every distinct sequence of ids that `words` stand for, in order; those past the vocabulary can never be drawn.

    Raises:
        RowError: `invalid_field` for a string that gives no tokens.
    """
    texts = [form for word in words if isinstance(word, str) for form in _forms(word)]
    encoded = iter(tokenizer.encode_plain([_BREAK, *texts]))
    lead = next(encoded)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[word] = None
            continue
        plain, behind_break, *spaced = (next(encoded) for _ in _forms(word))
        spellings = [plain, *spaced]
        if behind_break[: len(lead)] == lead:
            spellings.append(behind_break[len(lead) :])
        if not any(spellings):
            problem = f"holds {word!r}, which gives no tokens; remove it"
            raise RowError(ErrorCode.INVALID_FIELD, f"`bad_words` {problem}", "bad_words")
        found.update((tuple(ids), None) for ids in spellings if ids)
    return tuple(ids for ids in found if max(ids) < vocab_size)


def _forms(word: str) -> tuple[str, ...]:
    """The word plain, behind a line break, and with a space in front; a word of spaces alone has no third form."""
    bare = word.lstrip(" ")
    return (bare, _BREAK + bare, " " + bare) if bare else (word, _BREAK + word)
