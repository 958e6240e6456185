"""Images and sounds of a row: which forms they have, which prompt gets them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from batchgen.errors import ErrorCode, RowError
from batchgen.request.fields.media import MediaItem
from batchgen.request.fields.prompts import ChatPrompt, TextPrompt, TokenPrompt
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from tests.cases import each

PNG = "data:image/png;base64,iVBORw0KGgo="


def parse(row: dict[str, Any], **defaults: Any) -> list[Any]:
    return list(parse_row(row, 0, RowDefaults(**defaults)).prompts)


def media_of(row: dict[str, Any], **defaults: Any) -> list[list[tuple[Any, str]]]:
    """By prompt: (source, place) of its items."""
    return [[(item.source, item.place) for item in prompt.media] for prompt in parse(row, **defaults)]


def item_of(part: Any) -> MediaItem:
    """The item of a part of a message."""
    (prompt,) = parse({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    assert isinstance(prompt, ChatPrompt)
    (item,) = prompt.media
    assert item.place == "messages[0].content[1]"
    assert prompt.messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": item.kind}]
    return item


def refusal(row: Any) -> tuple[str, str | None, str]:
    with pytest.raises(RowError) as caught:
        parse(row)
    info = caught.value.info
    return info.code, info.param, info.message


@pytest.mark.field("image_data", "audio_data")
@each("name", ["image_data", "audio_data"])
@each(
    "text, value, expected",
    [
        ("a", "x", [[("x", "D")]]),
        ("a", ["x", "y"], [[("x", "D[0]"), ("y", "D[1]")]]),
        ("a", [["x", "y"]], [[("x", "D[0][0]"), ("y", "D[0][1]")]]),
        ("a", ["x", None, ""], [[("x", "D[0]")]]),
        (["a"], ["x", "y"], [[("x", "D[0]"), ("y", "D[1]")]]),
        (["a", "b"], "x", [[("x", "D")], [("x", "D")]]),
        (["a", "b"], ["x", "y"], [[("x", "D[0]")], [("y", "D[1]")]]),
        (["a", "b"], ["x", None], [[("x", "D[0]")], []]),
        (["a", "b"], [["x", "y"], []], [[("x", "D[0][0]"), ("y", "D[0][1]")], []]),
        (["a", "b"], [["x"], "y"], [[("x", "D[0][0]")], [("y", "D[1]")]]),
        (["a", "b"], [None, ["x"]], [[], [("x", "D[1][0]")]]),
        ("a", [], [[]]),
        ("a", "", [[]]),
        ("a", None, [[]]),
        ("a", [None], [[]]),
    ],
)
def test_items_of_prompts(name: str, text: Any, value: Any, expected: list[list[tuple[str, str]]]) -> None:
    found = [[(source, place.replace("D", name)) for source, place in prompt] for prompt in expected]
    assert media_of({"text": text, name: value}) == found
    ids = [[1, 2], [3]] if isinstance(text, list) and len(text) == 2 else [1]
    prompts = parse({"input_ids": ids, name: value})
    assert all(isinstance(prompt, TokenPrompt) for prompt in prompts)
    assert [[(item.source, item.place) for item in prompt.media] for prompt in prompts] == found


@pytest.mark.field("image_data", "audio_data")
def test_images_come_before_sounds() -> None:
    (prompt,) = parse({"text": "a", "audio_data": "s", "image_data": ["i", "j"]})
    assert isinstance(prompt, TextPrompt)
    assert [(item.kind, item.source) for item in prompt.media] == [("image", "i"), ("image", "j"), ("audio", "s")]


@pytest.mark.field("image_data")
@pytest.mark.parametrize(("count", "value"), [(2, ["x"]), (2, ["x", "y", "z"]), (3, [["x"], ["y"]]), (1, [["x"], []])])
def test_a_list_of_another_length_than_the_prompts_is_refused(count: int, value: Any) -> None:
    code, param, message = refusal({"text": ["a"] * count, "image_data": value})
    assert (code, param) == ("invalid_field", "image_data")
    assert f"{len(value)} entries" in message
    assert f"{count} prompts" in message


ARRAY = np.zeros((2, 3, 3), np.uint8)
SOUND = np.zeros(8, np.float32)
SOURCES: list[tuple[str, Any, Any]] = [
    ("image", {"url": PNG, "detail": "low"}, PNG),
    ("image", {"path": "a.png", "bytes": None}, "a.png"),
    ("image", {"path": "a.png", "bytes": b"xy"}, b"xy"),
    ("image", {"base64": "QUJD"}, "QUJD"),
    ("image", b"xy", b"xy"),
    ("image", bytearray(b"xy"), b"xy"),
    ("image", Path("deep/a.png"), "deep/a.png"),
    ("image", "http://example.com/a.png", "http://example.com/a.png"),
    ("image", ARRAY, ARRAY),
    ("image", torch.zeros(3, 2, 2, dtype=torch.uint8), np.zeros((3, 2, 2), np.uint8)),
    ("image", torch.zeros(2, 2, dtype=torch.bfloat16), np.zeros((2, 2), np.float32)),
    ("audio", {"data": "QUJD", "format": "wav"}, "QUJD"),
    ("audio", {"array": SOUND, "sampling_rate": 8000, "path": "a.wav"}, (SOUND, 8000)),
    ("audio", {"array": [0.5, 0.25], "sampling_rate": 8000.0}, (np.array([0.5, 0.25], np.float32), 8000)),
    ("audio", (SOUND, 16000), (SOUND, 16000)),
    ("audio", (torch.zeros(8), np.int64(16000)), (SOUND, 16000)),
    ("audio", b"RIFF", b"RIFF"),
]


@pytest.mark.field("image_data", "audio_data")
@each("kind, value, expected", SOURCES)
@each("form", ["single", "list", "part"])
def test_forms_of_an_item(kind: str, value: Any, expected: Any, form: str) -> None:
    if form == "part":
        item = item_of({"type": kind, kind: value})
    else:
        (prompt,) = parse({"text": "a", f"{kind}_data": value if form == "single" else [value]})
        (item,) = prompt.media
    assert item.form == "raw"
    np.testing.assert_equal(item.source, expected)


@pytest.mark.field("image_data")
def test_an_image_of_pil_is_an_item() -> None:
    image = Image.new("RGB", (2, 2))
    assert media_of({"text": "a", "image_data": image}) == [[(image, "image_data")]]
    assert item_of({"type": "image", "image": image}).source is image


@pytest.mark.field("image_data", "audio_data")
@pytest.mark.parametrize("form", ["processor_output", "precomputed_embedding"])
def test_values_made_by_a_processor_or_an_encoder(form: str) -> None:
    given = {"format": form, "feature": [[0.5]], "image_grid_thw": "a.safetensors:grid", "modality": None}
    (prompt,) = parse({"text": "a", "image_data": given})
    (item,) = prompt.media
    assert (item.form, item.source) == (form, {"feature": [[0.5]], "image_grid_thw": "a.safetensors:grid"})


@pytest.mark.field("messages")
@pytest.mark.parametrize(
    ("part", "kind", "source", "detail"),
    [
        ({"type": "image_url", "image_url": {"url": PNG}}, "image", PNG, None),
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "high"}}, "image", PNG, "high"),
        ({"type": "image_url", "image_url": PNG, "uuid": "7"}, "image", PNG, None),
        ({"type": "input_image", "image_url": PNG, "detail": "auto"}, "image", PNG, "auto"),
        ({"type": "image", "image": "a.png", "cache_control": {"type": "ephemeral"}}, "image", "a.png", None),
        ({"type": "image", "url": "a.png"}, "image", "a.png", None),
        ({"type": "image", "path": "a.png", "url": None}, "image", "a.png", None),
        ({"type": "image", "base64": "QUJD"}, "image", "QUJD", None),
        ({"type": "image", "image_url": "a.png"}, "image", "a.png", None),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}}, "audio", "QUJD", None),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, "audio", "a.wav", None),
        ({"type": "audio", "audio": "a.wav"}, "audio", "a.wav", None),
        ({"type": "audio", "audio_url": "a.wav"}, "audio", "a.wav", None),
    ],
)
def test_parts_of_messages(part: Any, kind: str, source: Any, detail: str | None) -> None:
    item = item_of(part)
    assert (item.kind, item.source, item.detail) == (kind, source, detail)


def body(content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}


@pytest.mark.field("messages")
def test_a_chat_body_has_the_same_parts() -> None:
    part = {"type": "image_url", "image_url": {"url": PNG}}
    assert media_of(body([part, {"type": "text", "text": "a"}])) == [[(PNG, "messages[0].content[0]")]]


def asked(*content: Any, system: str | None = None, **body: Any) -> dict[str, Any]:
    """A line for a model that sees images."""
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [*first, {"role": "user", "content": [*content]}]
    return {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "gpt-4o-mini", "messages": messages, **body}}  # fmt: skip


QUESTION = {"type": "text", "text": "What is in this image?"}
DOCUMENTED = {
    "images by URL": (
        asked(QUESTION, {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}}, system="Caption it.",
              temperature=0.2, max_tokens=300),
        [("https://example.com/a.jpg", None)],
    ),
    "data URLs with detail": (
        asked(QUESTION, {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
              max_completion_tokens=50, response_format={"type": "json_object"}),
        [(PNG, "high")],
    ),
    "several parts": (
        asked({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, QUESTION,
              {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/", "detail": "auto"}},
              {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
              modalities=["text"], store=False),
        [(PNG, "low"), ("data:image/jpeg;base64,/9j/", "auto"), ("UklGRg==", None)],
    ),
}  # fmt: skip
"""Lines as the vision guides of providers show them."""


@pytest.mark.field("messages", "body")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_lines_with_images_are_taken_as_they_are(name: str) -> None:
    value, expected = DOCUMENTED[name]
    (prompt,) = parse(value, names=ModelNames(accept_all=True))
    assert [(item.source, item.detail) for item in prompt.media] == expected


@pytest.mark.field("messages", "image_data", "audio_data")
def test_parts_without_an_item_take_those_of_the_row_in_order() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "audio"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    (prompt,) = parse({"messages": messages, "image_data": ["x", "y"], "audio_data": "z"})
    assert isinstance(prompt, ChatPrompt)
    assert [item.source for item in prompt.media] == ["x", "z", "y"]
    assert list(prompt.messages) == messages


@pytest.mark.field("messages", "image_data")
@pytest.mark.parametrize("content", ["What?", [{"type": "text", "text": "What?"}]])
def test_items_of_a_row_are_put_in_front_of_the_first_user_message(content: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    (prompt,) = parse({"messages": messages, "image_data": ["x", "y"]})
    assert isinstance(prompt, ChatPrompt)
    expected = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    assert list(prompt.messages) == [messages[0], {"role": "user", "content": expected}]
    assert media_of({"text": "What?", "image_data": ["x"]}, chat=True, system="s") == [[("x", "image_data[0]")]]


BAD: list[tuple[Any, str, str, str]] = [
    ({"image_data": 5}, "invalid_field", "image_data", "got an integer"),
    ({"image_data": [["a", 5]]}, "invalid_field", "image_data", "`image_data[0][1]`"),
    ({"image_data": [[["a"]]]}, "invalid_field", "image_data", "`image_data[0][0]`"),
    ({"image_data": True}, "invalid_field", "image_data", "got a boolean"),
    ({"image_data": {}}, "invalid_field", "image_data", "without an item"),
    ({"image_data": {"url": 5}}, "invalid_field", "image_data", "must be a string"),
    ({"image_data": {"url": ""}}, "invalid_field", "image_data", "is empty"),
    ({"image_data": {"url": "a", "path": "b"}}, "invalid_field", "image_data", "'path'"),
    ({"image_data": {"url": "a", "width": 5}}, "invalid_field", "image_data", "'width'"),
    ({"image_data": {"url": "a", "detail": "max"}}, "invalid_field", "image_data", "low, high"),
    ({"image_data": {"url": "a", "format": "png"}}, "invalid_field", "image_data", "`format`"),
    ({"image_data": {"url": "a", "format": ["png"]}}, "invalid_field", "image_data", "`format`"),
    ({"image_data": {"format": "precomputed_embedding", "grid": 1}}, "invalid_field", "image_data", "feature"),
    ({"image_data": {"format": "processor_output"}}, "invalid_field", "image_data", "no values"),
    ({"audio_data": SOUND}, "invalid_field", "audio_data", "sampling rate"),
    ({"audio_data": (SOUND, 0)}, "invalid_field", "audio_data", "sampling rate in Hz"),
    ({"audio_data": (SOUND, 0.5)}, "invalid_field", "audio_data", "sampling rate in Hz"),
    ({"audio_data": {"array": [0.5]}}, "invalid_field", "audio_data", "sampling rate in Hz"),
    ({"audio_data": {"array": ["a"], "sampling_rate": 8000}}, "invalid_field", "audio_data", "not numbers"),
    ({"audio_data": {"data": "a", "sampling_rate": 8000}}, "invalid_field", "audio_data", "`sampling_rate`"),
    ({"audio_data": {"data": "a", "format": "pcm16"}}, "invalid_field", "audio_data", "wav"),
    ({"audio_data": {"data": "a", "detail": "low"}}, "invalid_field", "audio_data", "detail"),
    ({"audio_data": (SOUND, SOUND)}, "invalid_field", "audio_data", "sampling rate"),
    ({"audio_data": {"array": SOUND, "sampling_rate": SOUND}}, "invalid_field", "audio_data", "sampling rate in Hz"),
    ({"audio_data": {"data": "a", "format": ARRAY}}, "invalid_field", "audio_data", "`format`"),
    ({"image_data": {"url": "a", "detail": ARRAY}}, "invalid_field", "image_data", "low, high"),
]
BAD_PARTS: list[tuple[Any, str, str]] = [
    ({"type": "image_url"}, "invalid_field", "needs `image_url`"),
    ({"type": "image_url", "image_url": {}}, "invalid_field", "needs `image_url`"),
    ({"type": "image_url", "image_url": {"url": 5}}, "invalid_field", "must be a string"),
    ({"type": "image_url", "image_url": {"url": "a", "size": 5}}, "invalid_field", "'size'"),
    ({"type": "image_url", "image_url": {"url": "a"}, "min_pixels": 5}, "invalid_field", "'min_pixels'"),
    ({"type": "image", "image": "a", "url": "b"}, "invalid_field", "'url'"),
    ({"type": "input_image", "file_id": "f"}, "invalid_field", "'file_id'"),
    ({"type": "image"}, "media_error", "without an item"),
    ({"type": "audio"}, "media_error", "`audio_data`"),
    ({"type": "video", "video": "a.mp4"}, "unsupported_field", "frames"),
    ({"type": "video_url", "video_url": {"url": "a"}}, "unsupported_field", "video_url"),
    ({"type": "file", "file": {"file_id": "f"}}, "unsupported_field", "type file"),
]


@pytest.mark.field("image_data", "audio_data")
@each("fields, code, param, word", BAD)
def test_wrong_items_are_refused(fields: dict[str, Any], code: str, param: str, word: str) -> None:
    found = refusal({"text": "a", **fields})
    assert found[:2] == (code, param)
    assert word in found[2]


@pytest.mark.field("messages")
@pytest.mark.parametrize(("part", "code", "word"), BAD_PARTS)
def test_wrong_parts_are_refused(part: Any, code: str, word: str) -> None:
    found = refusal({"messages": [{"role": "user", "content": [part]}]})
    assert found[:2] == (code, "messages")
    assert word in found[2]
    assert refusal(body([part])) == found


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.field("image_data", "messages", "input_embeds")
@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"messages": user({"type": "image"}, {"type": "image"}), "image_data": "x"}, ErrorCode.MEDIA_ERROR),
        ({"messages": user({"type": "image"}), "image_data": ["x", "y"]}, ErrorCode.MEDIA_ERROR),
        ({"messages": user({"type": "image", "url": "u"}), "image_data": "x"}, ErrorCode.INVALID_FIELD),
        ({"messages": [{"role": "system", "content": "a"}], "image_data": "x"}, ErrorCode.INVALID_FIELD),
        ({"input_embeds": [[0.5]], "image_data": "x"}, ErrorCode.INVALID_FIELD),
    ],
)
def test_items_that_no_place_takes_are_refused(row: Any, code: ErrorCode) -> None:
    assert refusal(row)[:2] == (code, "image_data")


@pytest.mark.field("messages")
@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_text_of_responses_is_text(kind: str) -> None:
    """With an image next to it or without one, as templates test for `text`."""
    image = {"type": "input_image", "image_url": PNG}
    for more in ([], [image]):
        (found,) = parse({"messages": [{"role": "user", "content": [{"type": kind, "text": "a"}, *more]}]})
        (usual,) = parse({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *more]}]})
        assert found.messages == usual.messages
        assert len(found.media) == len(more)
    code, param, message = refusal({"messages": [{"role": "user", "content": [{"type": kind, "text": 3}]}]})
    assert (code, param) == ("invalid_field", "messages")
    assert "messages[0].content[0].text" in message
