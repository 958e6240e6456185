"""The vision tower and projector of the demonstration model, and their export with the language model, as a LLaVA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from configs.demo_model.export import language_weights, text_settings
from configs.demo_model.pictures import SIZE
from configs.demo_model.tokenizer import CHAT_TEMPLATE

PATCH: Final = 16
FEATURES: Final = (SIZE // PATCH) ** 2
"""Features of a picture."""
IMAGE: Final = "<|image|>"
"""The token of a picture in a prompt."""
_UNUSED_BYTE: Final = "\u00ff"
"""How the tokenizer writes the byte 0xFF, which no text has: its token becomes `IMAGE`, and the vocabulary stays."""


def vision_config() -> SiglipVisionConfig:
    """Sizes of the tower."""
    return SiglipVisionConfig(
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        vision_use_head=False,
    )


def vision_model(hidden: int) -> nn.ModuleDict:
    """The `tower`, and a `projector` of its features to the `hidden` values of a token."""
    width = vision_config().hidden_size
    projector = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
    return nn.ModuleDict({"tower": SiglipVisionModel(vision_config()), "projector": projector})


def tower_states(tower: Any, images: Tensor) -> Tensor:
    """[B, S, S, 3] uint8 -> [B, P, W]: what LLaVA takes from its tower, after its last layer and before its last norm.

    Values of pixels go from -1 to 1, as by the library's image processor.
    """
    pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    found: Tensor = tower(pixel_values=pixels, output_hidden_states=True).hidden_states[-1]
    return found


@torch.no_grad()
def rescale(tower: Any, images: Tensor) -> None:
    """Scale what the tower's layers add up, so that its states for `images` have a standard deviation of 1.

    Its layers read the sum through norms, so that nothing else changes. A projector then begins at the scale of tokens.
    """
    scale = 1 / tower_states(tower, images).std()
    tower.embeddings.patch_embedding.weight.mul_(scale)
    tower.embeddings.patch_embedding.bias.mul_(scale)
    tower.embeddings.position_embedding.weight.mul_(scale)
    for layer in tower.encoder.layers:
        for linear in (layer.self_attn.out_proj, layer.mlp.fc2):
            linear.weight.mul_(scale)
            linear.bias.mul_(scale)


def export_pictures(model: nn.ModuleDict, base: Path, out: Path) -> None:
    """Write a folder with the language model of `base`, and the tower and projector, in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _image_tokenizer(base, out)
    text = LlamaConfig(**text_settings(base))
    config = LlavaConfig(
        text_config=text.to_dict(),
        vision_config=vision_config().to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    whole = LlavaForConditionalGeneration(config).to(torch.bfloat16).eval()
    projector = dict(zip(("0", "2"), ("linear_1", "linear_2"), strict=True))
    weights = {f"model.language_model.{name}": value for name, value in language_weights(base).items()}
    weights |= {f"model.vision_tower.{name}": value for name, value in model["tower"].state_dict().items()}
    for name, value in model["projector"].state_dict().items():
        place, _, kind = name.partition(".")
        weights[f"model.multi_modal_projector.{projector[place]}.{kind}"] = value
    missing, unexpected = whole.load_state_dict({k: v.bfloat16() for k, v in weights.items()}, strict=False)
    assert missing in ([], ["lm_head.weight"]), missing
    assert not unexpected, unexpected
    whole.tie_weights()
    ends = {name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    whole.generation_config = GenerationConfig(do_sample=False, **ends)
    whole.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    (out / "processor_config.json").write_text(json.dumps(_processor(), indent=2) + "\n", encoding="utf-8")


def _image_tokenizer(base: Path, out: Path) -> Any:
    """Write the tokenizer of `base` with a token for pictures; returns it."""
    found = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = found["model"]["vocab"]
    if IMAGE not in vocabulary:
        number = vocabulary.pop(_UNUSED_BYTE)
        vocabulary[IMAGE] = number
        found["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
        found["added_tokens"].append({**found["added_tokens"][0], "id": number, "content": IMAGE})
    (out / "tokenizer.json").write_text(json.dumps(found, ensure_ascii=False, indent=2), encoding="utf-8")
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    others = settings["additional_special_tokens"]
    settings["additional_special_tokens"] = [*others, *([] if IMAGE in others else [IMAGE])]
    settings["chat_template"] = CHAT_TEMPLATE
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return AutoTokenizer.from_pretrained(out)


def _processor() -> dict[str, Any]:
    """How the library reads pictures: resized to the tower's size, values from -1 to 1, one token for each feature."""
    return {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
        "image_processor": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": SIZE, "width": SIZE},
            "resample": 2,
            "do_convert_rgb": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }
