"""Images and sounds in prompts: what they become replaces their placeholders, in texts and in ids."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import out_of_range
from batchgen.request.fields.media_items import PlacedItem
from batchgen.text.tokens.tokenizer import Tokenizer

Ints = npt.NDArray[np.int32]


def expanded_text(text: str, items: Sequence[PlacedItem]) -> str:
    """A text with each placeholder replaced by the text of its item: those of one kind are in order.

    Raises:
        RowError: `media_error`: it has more or fewer placeholders than items of a kind.
    """
    by_placeholder = _by_placeholder(items)
    texts = {}
    for placeholder, own in by_placeholder.items():
        _check_count(own, text.count(placeholder), f"{placeholder!r} in the prompt's text")
        texts[placeholder] = iter([item.text for item in own])
    pattern = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.sub(pattern, lambda match: next(texts[match[0]]), text) + items[-1].end


def expanded_ids(ids: Sequence[int], items: Sequence[PlacedItem], tokenizer: Tokenizer) -> list[int]:
    """Ids of a prompt with each placeholder replaced by the ids of its item; the same ids if they hold these already.

    Raises:
        RowError: `media_error`, as `expanded_text`.
    """
    expanded = list(ids)
    for placeholder, own in _by_placeholder(items).items():
        (as_ids,) = tokenizer.encode_plain([placeholder])
        if expanded.count(own[0].item.token_id) == sum(item.item.features for item in own):
            continue
        many = len(as_ids) != 1
        _check_count(own, 0 if many else expanded.count(as_ids[0]), f"{placeholder!r} (id {as_ids[0]}) in the prompt")
        each = iter([tokenizer.encode_plain([item.text])[0] for item in own])
        expanded = [token for one in expanded for token in (next(each) if one == as_ids[0] else (one,))]
        expanded += tokenizer.encode_plain([own[-1].end])[0] if own[-1].end else []
    return expanded


def feature_count(items: Sequence[PlacedItem], context: int) -> int:
    """Number of features of a prompt's items.

    Raises:
        RowError: `context_length_exceeded`: they fill the context alone.
    """
    total = sum(item.item.features for item in items)
    if total >= context:
        what = items[0].place if len(items) == 1 else f"{items[0].place} and {len(items) - 1} more items"
        problem = f"`{what}` become {total} tokens of the prompt, and the context is {context}"
        remedy = "make them smaller, or give fewer in one prompt"
        raise RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{problem}; {remedy}", items[0].place.partition("[")[0])
    return total


def stored_ids(ids: Sequence[int], items: Sequence[PlacedItem], vocab_size: int) -> Ints:
    """[P] ids of a prompt for the `RequestTable`: `vocab_size` plus the item's number for each feature.

    Raises:
        RowError: `media_error`: the prompt has more or fewer tokens for features than its items have;
            `token_out_of_range` for another token that is not in the vocabulary.
    """
    tokens = np.array(ids, np.int32)
    stored = tokens.copy()
    by_token = defaultdict(list)
    for item in items:
        by_token[item.item.token_id].append(item)
    for token_id, own in by_token.items():
        places = np.flatnonzero(tokens == token_id)
        counts = [item.item.features for item in own]
        if len(places) != sum(counts):
            problem = (
                f"and the other items of its kind become {sum(counts)} tokens, and the prompt has {len(places)} for "
                "them; do not write the model's own tokens for items into the prompt, in addition to its placeholders"
            )
            raise own[0].error(problem)
        stored[places] = np.repeat(np.array([vocab_size + item.number for item in own], np.int32), counts)
    others = stored[stored == tokens]
    if len(others) and others.max() >= vocab_size:
        raise out_of_range(items[0].place, int(others.max()), vocab_size)
    return stored


def _by_placeholder(items: Sequence[PlacedItem]) -> dict[str, list[PlacedItem]]:
    by_placeholder = defaultdict(list)
    for item in items:
        by_placeholder[item.placeholder].append(item)
    return by_placeholder


def _check_count(items: Sequence[PlacedItem], placeholders: int, what: str) -> None:
    if placeholders != len(items):
        item = items[min(placeholders, len(items) - 1)]
        have = f"there are {len(items)} of its kind, and {placeholders} placeholders {what}"
        raise item.error(f"needs a placeholder: {have}; write one where each item belongs")
