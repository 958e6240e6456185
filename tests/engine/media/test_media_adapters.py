"""Rows with images and an adapter equal peft on the library's eager model, next to rows of the image without it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from batchgen import Engine
from tests.engine.media.test_media_models import FIELDS, SMALL, WIDE, greedy
from tests.models.media_steps import Parts, library_inputs, load, media_row
from tests.models.tiny_media import save_media

PARTS: list[Parts] = [["one ", SMALL, " tells"], ["one ", WIDE, " tells"], ["only words"]]
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "up_proj")
DECODER = rf".*language_model.*\.({'|'.join(PROJECTIONS)})"
NAMES: dict[str, Callable[[str], str]] = {
    "model.language_model.layers": lambda name: name,
    "language_model.model.layers": lambda name: name.replace("model.language_model.", "language_model.model.", 1),
    "model.layers": lambda name: name.replace("model.language_model.", "model.", 1),
    "layers": lambda name: name.replace("model.language_model.", "", 1),
    "thinker.model.layers": lambda name: name.replace("model.language_model.", "thinker.model.", 1),
}
"""How adapters of one decoder name it -> the name of the library's class of today in it."""


def adapted(model: Any, folder: Path, **config: Any) -> PeftModel:
    """A model with a random adapter, which is saved."""
    made: Any = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 7, **config}))
    generator = torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft finds no model card
        made.save_pretrained(folder)
    found: PeftModel = made.eval()
    return found


def renamed(adapter: Path, folder: Path, rename: Callable[[str], str], target: Any) -> Path:
    """A copy of an adapter with other names of modules."""
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": target}))
    prefix = "base_model.model."
    tensors = load_file(adapter / "adapter_model.safetensors")
    changed = {prefix + rename(name.removeprefix(prefix)): value for name, value in tensors.items()}
    save_file(changed, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.field("lora_path", "image_data")
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_adapters_of_the_decoder_under_every_name(family: str, tmp_path: Path) -> None:
    model, library = save_media(family, tmp_path / "base")
    loaded = load(tmp_path / "base", library)
    inputs = [library_inputs(loaded, parts) for parts in PARTS]
    plain = [greedy(model, each) for each in inputs]
    made = adapted(model, tmp_path / "saved", target_modules=DECODER)
    expected = [greedy(made.base_model.model, each) for each in inputs]
    assert all(ours != theirs for (_, ours, _), (_, theirs, _) in zip(plain, expected, strict=True))
    adapters: dict[str | None, Path] = {}
    for name, rename in NAMES.items():
        target: Any = DECODER if "language_model" in name else list(PROJECTIONS)
        adapters[name] = renamed(tmp_path / "saved", tmp_path / name, rename, target)
    lora = [f"{name}={folder}" for name, folder in adapters.items()]
    rows = [
        media_row(loaded.processor, parts, lora_path=name, **FIELDS) for name in (None, *adapters) for parts in PARTS
    ]
    engine = Engine(str(tmp_path / "base"), dtype="float32", max_model_len=512, page_size=4, lora=lora)
    found = engine.generate(rows, ordered=True)
    for done, (ids, logprobs, settled) in zip(found, [*plain, *expected * len(adapters)], strict=True):
        assert done.error is None, done.error
        assert list(done.output_ids or ())[:settled] == ids[:settled]
        np.testing.assert_allclose((done.output_logprobs or [])[:settled], logprobs[:settled], atol=1e-4, rtol=0)
    assert engine.last_run is not None
    assert engine.last_run.loop.counts()["media_encoded"] == 2
