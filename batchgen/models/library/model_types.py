"""How checkpoints of each model type of the installed transformers run."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from batchgen.errors import ModelError
from batchgen.models.architectures import causal_lm_types, choose_implementation, packed_types, runs_alone
from batchgen.models.checkpoint.text_part import is_packed, text_config
from batchgen.models.library.media_config import UNSUPPORTED
from batchgen.models.library.meta import check_config
from batchgen.models.library.text import decoder_config

HEAD: Final = ("type", "runs", "images and audio", "what runs, or the missing computation")
COMPARED: Final = {
    "image": """aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid
        exaone4_5 gemma3 glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 granite4_vision hunyuan_vl hyperclovax_vision_v2
        idefics3 internvl kimi_k25 lighton_ocr llama4 llava llava_next llava_next_video llava_onevision mistral3 ovis2
        paddleocr_vl paligemma qianfan_ocr qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm step3p7
        video_llama_3 video_llava vipllava""",
    "audio": "glmasr granite_speech granite_speech_plus qwen2_audio qwen3_asr voxtral",
    "image, audio": """gemma3n gemma4 phi4_multimodal qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe
        qwen3_omni_moe_thinker""",
    "no: its processor changes the text around images": "idefics2",
}
"""Items that types read -> the types for which tests compare them with transformers."""
_MEDIA: Final = {name: kinds for kinds, names in COMPARED.items() for name in names.split()}
_NOT_BUILT: Final = "not tried: the library cannot run its default configuration"
_NAMES: Final = ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.input_layernorm.weight")
"""Names of stored tensors, as in checkpoints with a text decoder and more."""


def model_types(part: str) -> list[tuple[str, ...]]:
    """A row of cells, as in `HEAD`, for each model type with `part` in its name, by its default configuration."""
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
    config = _default_config(name)
    values = {**({} if config is None else config.to_dict()), "model_type": name}
    try:
        chosen = choose_implementation(values, "auto", _NAMES)
        alone = runs_alone(values, _NAMES)
        tried = chosen == "native" or (config is not None and _builds(config, alone=alone))
    except ModelError as error:
        return "no", missing(name, error)
    part = text_config(values).get("model_type")
    parts = [f"text, of `{part}`"] if part not in (None, name) else ["text"] if is_packed(values) else []
    return chosen, ", ".join(parts if tried else [*parts, _NOT_BUILT])


def missing(name: str, error: ModelError) -> str:
    """The missing computation, of the error that refuses a checkpoint of a type."""
    words = str(error)
    for end in (". Use", ", which"):
        words = words.partition(end)[0]
    return words.partition("not supported: ")[2] or words.partition(f"{name} ")[2] or words


def _default_config(name: str) -> Any:
    try:
        return CONFIG_MAPPING[name]()
    except Exception:  # some classes need values, or refuse their own defaults
        return None


def _builds(config: Any, *, alone: bool) -> bool:
    """Check a type by a few layers of its default configuration, which the library may fail to build: whether it does.

    Raises:
        ModelError: models of the type cannot run.
    """
    whole = decoder_config(config) if alone else getattr(config, "thinker_config", None) or config
    try:
        check_config(_few_layers(whole))
    except ModelError as error:
        if not isinstance(error.__cause__, Exception):
            raise
        return False
    except Exception:  # a configuration that its class refuses, or weights that do not fit into memory
        return False
    return True


def _few_layers(config: Any) -> Any:
    """A copy of a library configuration with the first layers alone, up to two of each type, and so for its parts."""
    small = deepcopy(config)
    layers: Any = getattr(small, "num_hidden_layers", None)
    for key, value in list(vars(small).items()):
        if isinstance(value, PreTrainedConfig):
            setattr(small, key, _few_layers(value))
        elif type(value) is int and key != "num_hidden_layers" and ("layers" in key or key == "depth"):
            setattr(small, key, min(value, 2))
    if isinstance(layers, int):
        kinds = list(getattr(small, "layer_types", None) or getattr(small, "layers_block_type", None) or ())
        ends = [place + 1 for place, kind in enumerate(kinds) if kinds[:place].count(kind) < 2]
        kept = min(layers, max([2, *ends]))
        for key, value in list(vars(small).items()):
            if isinstance(value, list | tuple) and len(value) == layers:
                setattr(small, key, value[:kept])
        small.num_hidden_layers = kept
    return small
