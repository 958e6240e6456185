"""Rows with images and an adapter equal peft on the library's eager model, next to rows of the image without it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from batchgen import Engine
from batchgen.errors import ModelError
from tests.engine.media.test_media_models import FIELDS, SMALL, WIDE, greedy
from tests.models.media_steps import Parts, library_inputs, load, media_row
from tests.models.tiny_media import save_media

PARTS: list[Parts] = [["one ", SMALL, " tells"], ["one ", WIDE, " tells"], ["only words"]]
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "up_proj")
DECODER = rf".*language_model.*\.({'|'.join(PROJECTIONS)})"
DECODERS = {
    "today's": "model.language_model.",
    "of older classes": "language_model.model.",
    "of the text model": "model.",
    "of its decoder": "",
    "of a thinker": "thinker.model.",
}
"""What precedes the names of the decoder's modules in adapters of classes around one decoder."""
Greedy = tuple[list[int], list[float], int]


def adapted(model: Any, folder: Path, **config: Any) -> PeftModel:
    """A model with a random adapter, which is saved."""
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft finds no model card, and embeddings that are the head
        made: Any = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 7, **config}))
        for name, weight in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
                weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        made.save_pretrained(folder)
    found: PeftModel = made.eval()
    return found


def renamed(adapter: Path, folder: Path, new: str, old: str, target: Any = None) -> Path:
    """A copy of an adapter whose modules have names with `old` in the place of `new`."""
    folder.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    changed = {} if target is None else {"target_modules": target}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changed}))
    prefix = "base_model.model."
    tensors = load_file(adapter / "adapter_model.safetensors")
    moved = {prefix + name.removeprefix(prefix).replace(new, old, 1): value for name, value in tensors.items()}
    save_file(moved, folder / "adapter_model.safetensors")
    return folder


def check(base: Path, processor: Any, expected: dict[str | None, list[Greedy]], **folders: Path) -> dict[str, int]:
    """Rows of every adapter, and of none, in one batch; returns the run's counts."""
    rows = [media_row(processor, parts, lora_path=name, **FIELDS) for name in expected for parts in PARTS]
    lora = [f"{name}={folder}" for name, folder in folders.items()]
    engine = Engine(str(base), dtype="float32", max_model_len=512, page_size=4, lora=lora)
    wanted = [each for of_name in expected.values() for each in of_name]
    for row, done, (ids, logprobs, settled) in zip(rows, engine.generate(rows, ordered=True), wanted, strict=True):
        assert done.error is None, done.error
        assert list(done.output_ids or ())[:settled] == ids[:settled], row
        assert done.output_logprobs is not None
        np.testing.assert_allclose(done.output_logprobs[:settled], logprobs[:settled], atol=1e-4, rtol=0)
    return engine.last_run.loop.counts()


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
    folders = {}
    for name, prefix in DECODERS.items():
        target = DECODER if "language_model" in prefix else list(PROJECTIONS)
        folders[name] = renamed(tmp_path / "saved", tmp_path / name, "model.language_model.", prefix, target)
    counts = check(tmp_path / "base", loaded.processor, {None: plain, **dict.fromkeys(folders, expected)}, **folders)
    assert counts["media_encoded"] == 2


SAVED = {"modules_to_save": ["multi_modal_projector"], "use_dora": True}
ENDS = ["embed_tokens", "lm_head"]
OLD = ("model.vision_tower.", "vision_tower.vision_model.")
TOWERS: list[Any] = [
    ("llava", {"target_modules": ["q_proj", "v_proj", "fc1"], **SAVED}, *OLD),
    ("qwen2_vl", {"target_modules": "all-linear"}, "model.visual.", "visual."),
    pytest.param("llava", {"target_modules": ["v_proj", "linear_1"]}, "model.", "", marks=pytest.mark.slow),
    pytest.param("gemma3", {"target_modules": "all-linear"}, *OLD, marks=pytest.mark.slow),
    pytest.param("llava", {"target_modules": ["v_proj"], "modules_to_save": ENDS}, *OLD, marks=pytest.mark.slow),
    pytest.param("granite4_vision", {"target_modules": "all-linear"}, "model.l", "l", marks=pytest.mark.slow),
    pytest.param(
        "qwen2_5_omni", {"target_modules": ["v_proj", "q", "proj"]}, "model.visual", "visual", marks=pytest.mark.slow
    ),
    pytest.param("idefics3", {"target_modules": ["proj", "q_proj"]}, "model.v", "v", marks=pytest.mark.slow),
]
"""Family, configuration of an adapter that changes modules of its towers, and their names of today and of before."""


@pytest.mark.field("lora_path", "image_data")
@pytest.mark.parametrize(("family", "config", "new", "old"), TOWERS, ids=str)
def test_adapters_of_towers(family: str, config: dict[str, Any], new: str, old: str, tmp_path: Path) -> None:
    """The features of an image are those of its row's adapter; other rows have the model's."""
    model, library = save_media(family, tmp_path / "base")
    loaded = load(tmp_path / "base", library)
    inputs = [library_inputs(loaded, parts) for parts in PARTS]
    plain = [greedy(model, each) for each in inputs]
    made = adapted(model, tmp_path / "saved", **config)
    expected = [greedy(made.base_model.model, each) for each in inputs]
    before = renamed(tmp_path / "saved", tmp_path / "before", new, old)
    of_name = {None: plain, "new": expected, "old": expected}
    counts = check(tmp_path / "base", loaded.processor, of_name, new=tmp_path / "saved", old=before)
    assert counts["media_encoded"] == 2 * len(of_name)


LAYER = "base_model.model.model.vision_tower.encoder.layers.0."
REFUSED: list[tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = [
    (
        {LAYER + "mlp.fc9.lora_A.weight": (2, 64), LAYER + "mlp.fc9.lora_B.weight": (64, 2)},
        {"target_modules": ["fc9"]},
        "changes model.vision_tower.encoder.layers.0.mlp.fc9.weight, which is not a parameter of the modules that read",
    ),
    (
        {LAYER + "mlp.fc1.lora_A.weight": (2, 64), LAYER + "mlp.fc1.lora_B.weight": (63, 2)},
        {"target_modules": ["fc1"]},
        r"matrices \[2, 64\] and \[63, 2\] do not fit model.vision_tower.encoder.layers.0.mlp.fc1",
    ),
    (
        {LAYER + "layer_norm1.lora_A.weight": (2, 1), LAYER + "layer_norm1.lora_B.weight": (64, 2)},
        {"target_modules": ["layer_norm1"]},
        "changes model.vision_tower.encoder.layers.0.layer_norm1, a LayerNorm, which is neither",
    ),
    (
        {LAYER + "layer_norm1.weight": (63,), LAYER + "layer_norm1.bias": (64,)},
        {"target_modules": ["q_proj"], "modules_to_save": ["layer_norm1"]},
        r"layer_norm1.weight, which has shape \[63\] in the adapter and \[64\] in the model",
    ),
]
"""Tensors and configuration of an adapter that LLaVA's towers cannot have, and the message."""


def test_what_cannot_be_changed_of_towers_is_named(tmp_path: Path) -> None:
    """It ends a run with images; text does not run the towers."""
    _, library = save_media("llava", tmp_path / "base")
    rows = [media_row(load(tmp_path / "base", library).processor, parts, lora_path="a", **FIELDS) for parts in PARTS]
    for number, (tensors, config, message) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        folder.mkdir()
        whole = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, **config}
        (folder / "adapter_config.json").write_text(json.dumps({**whole, "exclude_modules": r"^(?!.*vision).*"}))
        save_file({name: torch.ones(size) for name, size in tensors.items()}, folder / "adapter_model.safetensors")
        engine = Engine(str(tmp_path / "base"), dtype="float32", max_model_len=512, lora=[f"a={folder}"])
        with pytest.raises(ModelError, match=rf"The adapter a \(Engine argument `lora`\) cannot be used: .*{message}"):
            list(engine.generate(rows))
        (words,) = engine.generate(rows[2:])
        assert words.error is None
