"""Decode steps of rows with images in CUDA graphs: rotary positions on several axes are static inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.media.test_media_models import FIELDS, WIDE
from tests.engine.test_cuda_graph import check, products
from tests.models.media_steps import load, media_row
from tests.models.tiny_media import save_media

pytestmark = pytest.mark.usefixtures(products.__name__)
__all__ = ["products"]


def test_graphs_decode_behind_images_as_steps_without_them(tmp_path: Path) -> None:
    _, library = save_media("qwen2_vl", tmp_path)
    processor = load(tmp_path, library).processor
    rows = [media_row(processor, parts, **{**FIELDS, "return_logprob": False}) for parts in ([WIDE, "a"], ["b"])]
    _, counts = check(tmp_path, rows)
    assert counts["media_encoded"] == 1
