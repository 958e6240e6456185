"""A model that takes no images or sounds refuses the rows that have them, by name; the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen import Engine
from tests.e2e.model import save_model
from tests.media.samples import pixels, wave

PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}, PART]}]
ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a", "image_data": ["a.png"]}, "image_data[0]", "image_data"),
    ({"text": "a", "image_data": pixels()}, "image_data", "image_data"),
    ({"text": ["a", "b"], "image_data": [None, "a.png"]}, "image_data[1]", "image_data"),
    ({"input_ids": [5, 6], "audio_data": (wave()[:, 0], 16000)}, "audio_data", "audio_data"),
    ({"messages": MESSAGES}, "messages[0].content[1]", "messages"),
    ({"method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}, "messages[0].", "messages"),
]


@pytest.mark.field("image_data", "audio_data", "messages")
def test_rows_with_media_are_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(save_model(tmp_path), attention="torch")
    good = {"text": "a", "max_new_tokens": 1, "image_data": [], "audio_data": None}
    first, *refused, last = engine.generate([good, *(row for row, _, _ in ROWS), good], ordered=True)
    assert first.error is None
    assert last.error is None
    for done, (_, place, param) in zip(refused, ROWS, strict=True):
        assert (done.error.code, done.error.param) == ("unsupported_field", param)
        assert f"`{place}" in done.error.message
