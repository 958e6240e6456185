"""How checkpoints of each model type of the installed transformers run."""

from __future__ import annotations

from typing import Any, Final

from transformers import CONFIG_MAPPING
from transformers.utils import logging

from batchgen.errors import ModelError
from batchgen.models.architectures import HYBRIDS, MIXERS, causal_lm_types, choose_implementation, packed_types
from batchgen.models.checkpoint.text_part import is_packed, text_config
from batchgen.models.library.media_config import UNSUPPORTED

HEAD: Final = ("type", "runs", "images and audio", "what runs, or the missing computation")
COMPARED: Final = {
    "image": """aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid
        exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite4_vision hunyuan_vl hyperclovax_vision_v2
        idefics3 internvl kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
        mistral3 ovis2 paddleocr_vl paligemma qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe
        shieldgemma2 smolvlm step3p7 video_llama_3 video_llava vipllava""",
    "audio": "glmasr granite_speech granite_speech_plus qwen2_audio qwen3_asr voxtral",
    "image, audio": """gemma3n gemma4 nemotron_h_omni phi4_multimodal qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe
        qwen3_omni_moe_thinker""",
    "no: its processor changes the text around images": "idefics2",
}
"""Items that types read -> the types for which tests compare them with transformers."""
_MEDIA: Final = {name: kinds for kinds, names in COMPARED.items() for name in names.split()}
_NAMES: Final = ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.input_layernorm.weight")
"""Names of stored tensors, as in checkpoints with a text decoder and more."""


def model_types(part: str) -> list[tuple[str, ...]]:
    """A row of cells, as in `HEAD`, for each model type with `part` in its name, by default sizes of the library."""
    wanted = part.lower().replace("-", "_")
    names = sorted({*causal_lm_types(), *packed_types()} & set(CONFIG_MAPPING))
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the library warns of default values
    try:
        return [_row(name) for name in names if wanted in name.replace("-", "_")]
    finally:
        logging.set_verbosity(level)


def _row(name: str) -> tuple[str, ...]:
    runs, what = _outcome(name)
    reads = f"no: {UNSUPPORTED[name]}" if name in UNSUPPORTED else _MEDIA.get(name, "not compared")
    return name, runs, reads if name in packed_types() and runs != "no" else "", what


def _outcome(name: str) -> tuple[str, str]:
    """(how checkpoints of a type run, what runs of them or the missing computation)."""
    config = {**_default_config(name), "model_type": name}
    try:
        chosen = choose_implementation(config, "auto", _NAMES)
    except ModelError as error:
        words = str(error)
        for end in (". Use", ", which"):
            words = words.partition(end)[0]
        return "no", words.partition("not supported: ")[2] or words.partition(f"{name} ")[2] or words
    part = text_config(config).get("model_type")
    if part in HYBRIDS and part not in MIXERS:
        return chosen, "where the configuration names layers of attention alone"
    return chosen, f"text, of `{part}`" if part not in (None, name) else "text" if is_packed(config) else ""


def _default_config(name: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    except Exception:  # some classes need values, or refuse their own defaults
        return {"is_encoder_decoder": "encoder-decoder" in name}
    return config
