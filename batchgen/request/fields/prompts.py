"""Forms of a prompt: text, token ids, a conversation, or embeddings; their media; and the check of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import TokenIds, error_at, invalid, json_type, nonempty_string
from batchgen.request.fields.media import MEDIA_FIELDS, MediaData, MediaItem, MediaKind, items_of
from batchgen.request.fields.media_items import PlacedItem
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.tool_choice import AUTO, ToolChoice

Items = tuple[MediaItem, ...] | tuple[PlacedItem, ...]
"""Images and sounds of a prompt: as its row gives them, then read and numbered."""


class TextPrompt(NamedTuple):
    """A prompt given as text; the tokenizer's BOS is added unless the text begins with it."""

    text: str
    media: Items = ()
    """Images in the order of their placeholders in the text, then sounds likewise."""
    query: str | None = None
    """What the text is scored for, in front of it; None for a prompt alone."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt given as token ids, used unchanged."""

    ids: TokenIds
    media: Items = ()
    """As for `TextPrompt`."""


class ChatPrompt(NamedTuple):
    """A conversation, rendered by the chat template."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tool_choice: ToolChoice = AUTO
    """Whether the answer calls the tools; the template does not see it."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    media: Items = ()
    """The items of the parts `{"type": "image"}` and `{"type": "audio"}` of the messages, in their order."""


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


def embeddings(name: str, value: Any) -> tuple[npt.NDArray[np.float32] | str, ...]:
    """Check a nested list, array or tensor of numbers [P, H], a list of those, or the name of a stored tensor."""
    if type(value) is str:
        return (nonempty_string(name, value),)
    if hasattr(value, "detach"):  # a torch tensor from the Python API; numpy has no bfloat16
        value = value.detach().float().cpu().numpy()
    if isinstance(value, np.ndarray):
        return (_float32_array(name, value),)
    if type(value) not in (list, tuple):
        raise invalid(name, f"must be a nested list of numbers or a tensor's name, got {json_type(value)}")
    several = bool(value) and (_is_array(value[0]) or (_is_list(value[0]) and bool(value[0]) and _is_list(value[0][0])))
    return tuple(_matrix(name, item) for item in value) if several else (_matrix(name, value),)


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _matrix(name: str, value: Any) -> npt.NDArray[np.float32]:
    """[P, H] float32 array of one nested list or array."""
    if _is_array(value):
        array = embeddings(name, value)[0]
        assert not isinstance(array, str)
        return array
    if not _is_list(value) or not all(_is_list(row) for row in value):
        raise invalid(name, "must be a list of lists of numbers, one list for each token")
    for row in value:
        # By exact type, because a boolean is an int; in C, because there may be millions of numbers.
        odd = set(map(type, row)) - {float, int}
        if odd:
            raise invalid(name, f"must contain only numbers, found {json_type(next(x for x in row if type(x) in odd))}")
        if len(row) != len(value[0]):
            raise invalid(name, f"must have rows of one length, got {len(value[0])} and {len(row)}")
    try:
        return _float32_array(name, np.array(value, np.float64).reshape(len(value), -1 if value and value[0] else 0))
    except OverflowError:
        raise invalid(name, "must contain finite float32 numbers") from None


def _float32_array(name: str, value: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if value.ndim != 2 or value.dtype.kind not in "fiu":
        raise invalid(name, f"must be numbers [tokens, size], got {value.dtype} of shape {list(value.shape)}")
    with np.errstate(over="ignore"):  # infinities are refused below
        values = value.astype(np.float32)
    if not np.isfinite(values).all():
        raise invalid(name, "must contain finite float32 numbers")
    return values


def refuse_with_embeds(params: SamplingParams) -> None:
    """Reject parameters that need a prompt of text or ids.

    Raises:
        RowError: `unsupported_field`: such a parameter is set.
    """
    asked = {
        "echo": params.echo,
        "suffix": params.suffix is not None,
        "logprob_start_len": params.return_logprob and params.logprob_start_len >= 0,
    }
    for name in (name for name, value in asked.items() if value):
        problem = "needs a prompt of text or ids, which `input_embeds` is not; leave it out"
        raise error_at(ErrorCode.UNSUPPORTED_FIELD, name, problem)


def with_media(prompts: Sequence[Prompt], values: Mapping[str, Any]) -> tuple[Prompt, ...]:
    """The prompts with their items: those of the parts of their messages, and those of `image_data` and `audio_data`.

    Args:
        prompts: the prompts of a row.
        values: the row's values by canonical name.

    Raises:
        RowError: `invalid_field` for items that belong to no prompt, `media_error` for parts without an item.
    """
    fields: list[MediaData] = [data for name in MEDIA_FIELDS.values() if (data := values.get(name)) and data.items]
    groups = zip(*(data.of_prompts(len(prompts)) for data in fields), strict=True) if fields else [()] * len(prompts)
    return tuple(_with_items(prompt, tuple(chain(*group))) for prompt, group in zip(prompts, groups, strict=True))


def _with_items(prompt: Prompt, items: tuple[MediaItem, ...]) -> Prompt:
    if isinstance(prompt, ChatPrompt):
        return _chat_with_items(prompt, items)
    if not items:
        return prompt
    if isinstance(prompt, EmbedsPrompt | StoredPrompt):
        raise invalid(items[0].field, "needs a prompt of text, ids or messages, which `input_embeds` is not")
    return TextPrompt(prompt.text, items) if isinstance(prompt, TextPrompt) else TokenPrompt(prompt.ids, items)


def _chat_with_items(prompt: ChatPrompt, items: tuple[MediaItem, ...]) -> ChatPrompt:
    """The conversation with its items: those of parts without one are of `items`, in order.

    Without such parts `items` are put in front of the first user message.
    """
    parts = [part for message in prompt.messages for part in _media_parts(message)]
    for kind, name in MEDIA_FIELDS.items():
        listed, own = items_of(items, kind), [part for part in parts if part["type"] == kind]
        bare = [part for part in own if "item" not in part]
        if own and not bare and listed:
            raise invalid(name, f"is given together with parts of `messages` that have their {kind}; keep one of them")
        if len(bare) != len(listed) and (own or not listed):
            raise _unmatched(name, kind, len(bare), len(listed))
    loose = [item for item in items if not any(part["type"] == item.kind for part in parts)]
    messages = _with_parts_in_front(prompt.messages, loose) if loose else prompt.messages
    rest = {kind: iter(items_of(items, kind)) for kind in MEDIA_FIELDS}
    media: list[MediaItem] = []
    plain = []
    for message in messages:
        own = _media_parts(message)
        media += [part["item"] if "item" in part else next(rest[part["type"]]) for part in own]
        if own:
            content = [{"type": part["type"]} if "item" in part else part for part in message["content"]]
            message = {**message, "content": content}
        plain.append(message)
    return prompt._replace(messages=tuple(plain), media=tuple(media))


def _media_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part for part in content if part["type"] in MEDIA_FIELDS]


def _with_parts_in_front(messages: Sequence[Mapping[str, Any]], items: Sequence[MediaItem]) -> list[Mapping[str, Any]]:
    """The messages with items at the beginning of the first user message."""
    at = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise invalid(items[0].field, "needs a user message to be put in")
    content = messages[at].get("content") or []
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    changed = {**messages[at], "content": [*({"type": item.kind, "item": item} for item in items), *texts]}
    return [*messages[:at], changed, *messages[at + 1 :]]


def _unmatched(name: str, kind: MediaKind, parts: int, items: int) -> RowError:
    if not items:
        problem = f"has a part of type {kind} without an item; give it `{kind}`, or the row `{name}`"
        return error_at(ErrorCode.MEDIA_ERROR, "messages", problem)
    problem = f"has {items} items for {parts} parts of type {kind} without an item in `messages`; give as many"
    return error_at(ErrorCode.MEDIA_ERROR, name, problem)


def placed_items(prompt: Prompt) -> tuple[PlacedItem, ...]:
    """The items of a prompt that were read and numbered."""
    return tuple(item for item in getattr(prompt, "media", ()) if isinstance(item, PlacedItem))
