"""Whole jobs of checkpoints that read images or sounds, or that are stored in FP8: the device against the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchgen.engine.engine import Engine
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.media.processor import MediaProcessor, find_media_processor
from tests.engine.reference import save_word_tokenizer
from tests.gpu.compare import Verdict
from tests.gpu.device import Gpu
from tests.gpu.jobs import engine_on, finished
from tests.gpu.mixed import compare
from tests.gpu.registry import Labelled, case
from tests.models.media_steps import Item, Parts, media_row
from tests.models.quantised import CASES, save_quantised
from tests.models.tiny import VOCAB
from tests.models.tiny_media import family_of, save_media

_SMALL, _WIDE, _SOUND = Item("image", (60, 40), 1), Item("image", (120, 60), 2), Item("audio", (4000,), 1)
_PROMPTS: dict[str, list[Parts]] = {
    "image": [["one ", _SMALL, " tells"], ["one ", _WIDE, " tells"], [_WIDE, "then ", _SMALL, "?"], ["only words"]],
    "audio": [["hear ", _SOUND, " now"], ["only words"]],
}


_GREEDY: dict[str, Any] = {
    "max_new_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_logprob": True,
    "top_logprobs_num": 2,
}
_FAR = 0.1
"""Largest difference of a first token's logprob with keys and values in E4M3."""


_FAMILIES = ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "qwen2_audio")


@case("engine", "media", [{"family": x} for x in _FAMILIES], [{"family": "qwen2_vl"}])
def rows_with_items(gpu: Gpu, *, family: str) -> Iterator[Labelled]:
    with tempfile.TemporaryDirectory() as name:
        save_media(family, Path(name))
        processor = find_media_processor(check_model_folder(Path(name)))
        assert isinstance(processor, MediaProcessor), processor
        own = [parts for kind in family_of(family).kinds for parts in _PROMPTS[kind]]
        rows = [media_row(processor, parts, **_GREEDY) for _ in range(6) for parts in own]
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
        want = finished(Engine(name, device="cpu", attention="torch", **options), rows)
        yield from compare(rows, finished(engine_on(gpu, name, **options), rows), want)


_STORED = ("compressed fp8", "compressed int4")


@case("engine", "stored weights", [{"stored": x} for x in _STORED], [{"stored": _STORED[0]}])
def rows_of_stored_weights(gpu: Gpu, *, stored: str) -> Iterator[Labelled]:
    with tempfile.TemporaryDirectory() as name:
        folder, _ = save_quantised(CASES[stored], "llama", Path(name))
        save_word_tokenizer(folder, VOCAB)
        rows = [{"input_ids": [1 + i, 5, 9 + i], **_GREEDY} for i in range(24)]
        options = {"dtype": "float32"}
        want = finished(Engine(str(folder), device="cpu", attention="torch", **options), rows)  # type: ignore[arg-type]
        for weights in ("none", "auto"):
            got = finished(engine_on(gpu, str(folder), quantization=weights, **options), rows)
            yield from ((f"{weights}: {what}", verdict) for what, verdict in compare(rows, got, want))
        if not gpu.toy:
            got = finished(engine_on(gpu, str(folder), kv_dtype="fp8", **options), rows)
            far = max(abs(a.output_logprobs[0] - b.output_logprobs[0]) for a, b in zip(got, want, strict=True))  # type: ignore[index]
            yield "fp8 cache: first logprobs", Verdict(far <= _FAR, far, 0.0, _FAR)
