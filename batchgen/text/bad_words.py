"""Token id sequences of `bad_words`, which must not be generated.

A string is banned with and without a leading space, so `foo` and ` foo` ban the same sequences. The form without a
space is also encoded after a line break, since some tokenizers put a space in front of every text.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.errors import ErrorCode, RowError
from batchgen.text.prompt_texts import calls
from batchgen.text.tokens.tokenizer import Tokenizer

_LINE_BREAK = "\n"


def bad_word_sequences(
    words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Distinct id sequences that spell `words`, in order, without those that hold ids past the vocabulary.

    Raises:
        RowError: `invalid_field` for a string that gives no tokens.
    """
    texts = [text for word in words if isinstance(word, str) for text in _spellings(word)]
    encoded = iter([ids for call in calls([_LINE_BREAK, *texts]) for ids in tokenizer.encode_plain(call)])
    line_break = next(encoded)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[word] = None
            continue
        plain, after_break, *spaced = (next(encoded) for _ in _spellings(word))
        sequences = [plain, *spaced]
        if after_break[: len(line_break)] == line_break:
            sequences.append(after_break[len(line_break) :])
        if not any(sequences):
            problem = f"holds {word!r}, which gives no tokens; remove it"
            raise RowError(ErrorCode.INVALID_FIELD, f"`bad_words` {problem}", "bad_words")
        found.update((tuple(ids), None) for ids in sequences if ids)
    return tuple(ids for ids in found if max(ids) < vocab_size)


def _spellings(word: str) -> tuple[str, ...]:
    """The word alone, after a line break and after a space; a word of spaces alone has no third spelling."""
    bare = word.lstrip(" ")
    return (bare, _LINE_BREAK + bare, " " + bare) if bare else (word, _LINE_BREAK + word)
