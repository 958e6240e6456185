"""Small random checkpoints of every class of transformers that reads images or audio too.

`save_packed("gemma3", folder)` writes one by the library's own class, with its vision tower, and returns the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from tests.models.tiny import LINEAR, by_type, common_fields, tiny_model

_TOWERS: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "in_channels": 3,
    "projection_dim": 64,
    "projector_hidden_size": 64,
    "vision_feature_layer": -1,
    "output_dim": 64,
    "encoder_hidden_size": 64,
    "num_query_tokens": 4,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_head_dim": 16,
    "resampler_n_heads": 4,
    "qk_layer_norms_perceiver": False,
    "mm_hidden_size": 64,
    "adaptor_output_dim": 64,
    "num_global_layers": 1,
}
"""Values for every tower that has the field."""
_SECTIONS = {8: [2, 3, 3], 4: [2, 1, 1], 2: [1, 1, 0]}
"""Frequencies of the three positions of multimodal rope, by the number of frequencies."""
_IMAGE_CODES = {"vocabulary_map": {"<image>": 5, **{f"IMGIMG{letter}Z": 10 + ord(letter) for letter in "ABCDEFGH"}}}
_BY_TYPE: dict[str, dict[str, Any]] = {
    "mistral4": by_type("deepseek_v3"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), LINEAR),
    "mistral_large4_text": by_type("glm_moe_dsa")
    | {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2, "kv_source_layers": [0, 0, 2, 3]},
    "hy_v4_vl_text": by_type("hy_v4")
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 48,
    },
    "radio": {"video_temporal_patch_size": 2},
    "minimax_m3_vl_text": by_type("minimax_m3_vl_text"),
    "dots3_note_text": by_type("dots3_note_text"),
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 3, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "chameleon": _IMAGE_CODES,
    "emu3": _IMAGE_CODES,
    "qwen3_omni_moe_text": {"sliding_window": None},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2", "spatial_target_layers": [2]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [-1]},
    "muse_spark_audio": {
        "num_hidden_layers": 4,
        "hidden_sizes": [64] * 4,
        "depths": [1] * 4,
        "patch_sizes": [4, 4, 4, 4],
    },
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64, "channel_multiplier": [1, 1]},
    "cohere_compass_text": by_type("cohere_compass_text"),
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48, "sliding_window": None},
}
_BY_CLASS: dict[str, dict[str, Any]] = {
    "Nemotron3_5TranscribeWordTimestampConfig": {"blank_token_id": 5},
    "Nemotron3DiarizationHeadConfig": {"audio_hidden_size": 64},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
}
"""As above, for classes without a type."""
_TOWERLESS = {"gemma3n": "gemma3n_text", "perception_lm": "llama", "apertus1p5": "apertus1p5_text"}
"""Classes whose towers need another package or no small size -> type of their text decoder.

Their checkpoints are those of the text decoder alone, under the names and in the configuration of the whole.
"""

_CODES = {
    "image_token_offset": 10,
    "audio_token_offset": 18,
    "vision_config": {"codebook_size": 8},
    "audio_config": {"codebook_size": 8},
}


def packed_config(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Small configuration of a class, and of all that it nests."""
    default = cls()
    fields = set(getattr(cls, "__dataclass_fields__", {})) or set(vars(default))
    known = common_fields(cls.model_type) | _TOWERS
    given = {key: value for key, value in known.items() if key in fields}
    if isinstance(getattr(default, "image_size", None), int) and isinstance(getattr(default, "patch_size", 0), int):
        given["image_size"] = 2 * getattr(default, "patch_size", 16)
    given |= _positions(cls, default)
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig) and not key.startswith("_"):
            # The tower of this class needs the package timm; text does not run another one either.
            timm = cls.model_type == "fast_vlm" and key == "vision_config"
            given[key] = packed_config(CONFIG_MAPPING["siglip_vision_model"] if timm else type(value))
    return cls(**{**given, **_BY_TYPE.get(cls.model_type, {}), **_BY_CLASS.get(cls.__name__, {})})


def _positions(cls: type[PreTrainedConfig], default: PreTrainedConfig) -> dict[str, Any]:
    """Rope settings whose sections fit the small heads, where a text decoder has sections."""
    source = Path(str(sys.modules[cls.__module__].__file__).replace("configuration_", "modeling_"))
    settings = getattr(default, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    nested = any(isinstance(value, dict) for value in settings.values())
    if not hasattr(default, "vocab_size") or nested or "mrope_section" not in source.read_text():
        return {}
    share = settings.get("partial_rotary_factor") or getattr(default, "partial_rotary_factor", None) or 1.0
    return {"rope_parameters": {**settings, "mrope_section": _SECTIONS[int(16 * share) // 2]}}


def packed_model(model_type: str) -> PreTrainedModel:
    """Float32 model with eager attention and random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = packed_config(CONFIG_MAPPING[model_type])
        return AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()


def save_packed(model_type: str, folder: Path) -> PreTrainedModel:
    """Write `packed_model(model_type)` as a Hugging Face folder without a tokenizer; returns the model."""
    if model_type in _TOWERLESS:
        return _save_towerless(model_type, folder)
    model = packed_model(model_type)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def _save_towerless(model_type: str, folder: Path) -> PreTrainedModel:
    model = tiny_model(_TOWERLESS[model_type])
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    tied = model.config.tie_word_embeddings
    head = {} if tied else {"lm_head.weight": model.get_output_embeddings().weight.detach().contiguous()}
    save_file({**renamed, **head, "model.vision_tower.stem.weight": torch.ones(2)}, folder / "model.safetensors")
    whole = {"model_type": model_type, "text_config": model.config.to_dict(), "tie_word_embeddings": tied}
    whole |= _CODES if model_type == "apertus1p5" else {}
    (folder / "config.json").write_text(json.dumps(whole))
    return model


def text_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The library's logits [n, V] of text alone, by its class or, if that cannot run without images, by its decoder."""
    part: Any = getattr(model, "thinker", model)
    try:
        out = part(input_ids=ids[None], use_cache=False)
    except (TypeError, AttributeError):
        out = part.language_model(input_ids=ids[None], use_cache=False)
    logits: torch.Tensor = out.logits[0].float()
    return logits
