"""Towers whose processors need packages that may be missing, and towers that decoders hold: tensors made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import logging

from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.media.encoder import load_media_encoder
from batchgen.models.media.processor import MediaKind, PreparedItem
from tests.models.loading import load_model
from tests.models.media_steps import Prompt, logits_of, runs
from tests.models.test_packed_types import SCALED
from tests.models.tiny_packed import packed_config

torch.set_num_threads(1)

Tensors = dict[str, Tensor]


def randn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def _llama4(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = config.image_token_index = 200
    sizes = {"image_size": 28, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "intermediate_size": 256}
    config.vision_config.update(
        {**sizes, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64}
    )
    return 200, 3, {"pixel_values": randn(3, 3, 28, 28)}


def _granite_speech(config: Any) -> tuple[int, int, Tensors]:
    config.audio_token_index = config.audio_token_id = 200
    config.has_lora_adapter = False
    config.encoder_config.update({"hidden_dim": 64, "input_dim": 32, "num_heads": 4, "dim_head": 16, "output_dim": 12})
    mask = torch.ones(1, 6, dtype=torch.bool)
    return 200, 6, {"input_features": randn(1, 20, 32), "input_features_mask": mask}


def _kimi(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = config.media_placeholder_token_id = 200
    config.projection_hidden_size = 64
    config.vision_config.update(
        {"patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8, "merge_kernel_size": [2, 2]}
    )
    return 200, 4, {"pixel_values": randn(16, 3, 14, 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def _phi4_image(config: Any) -> tuple[int, int, Tensors]:
    config.vision_config.update({"image_size": 28, "patch_size": 14, "crop_size": 28, "image_token_id": 200})
    config.vision_config.update({"feature_layer": -2})
    tensors = {"image_pixel_values": randn(1, 3, 3, 28, 28), "image_attention_mask": torch.ones(1, 3, 2, 2)}
    return 200, 6, {**tensors, "image_sizes": torch.tensor([[28, 56]])}


def _phi4_audio(config: Any) -> tuple[int, int, Tensors]:
    config.audio_config.update(
        {
            "audio_token_id": 200,
            "input_size": 16,
            "nemo_conv_channels": 64,
            "nemo_final_size": 2,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "feature_layer": -2,
        }
    )
    return 200, 5, {"audio_input_features": randn(1, 40, 16), "audio_embed_sizes": torch.tensor([5])}


Maker = Callable[[Any], tuple[int, int, Tensors]]


def _grid(patch: int, frames: int = 2, count: int = 4, **sizes: Any) -> Maker:
    """An image of four by four patches, of which two by two become a feature."""

    def make(config: Any) -> tuple[int, int, Tensors]:
        config.image_token_id = 200
        config.vision_config.update({"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2, **sizes})
        pixels = randn(16, 3 * frames * patch * patch)
        return 200, count, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}

    return make


def _square(size: int, patch: int, count: int, tiles: int = 1, **fields: Any) -> Maker:
    """Tiles of an image, which all become features."""

    def make(config: Any) -> tuple[int, int, Tensors]:
        for name, value in {"image_token_id": 200, "image_token_index": 200, **fields}.items():
            setattr(config, name, value)
        config.vision_config.update({"image_size": size, "patch_size": patch})
        return 200, count, {"pixel_values": randn(tiles, 3, size, size)}

    return make


def _hybrid(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = 200
    config.vision_config.update({"image_size": 28, "patch_size": 14})
    config.high_res_vision_config.update({"image_size": 64, "patch_size": 16})
    return 200, 4, {"pixel_values": randn(1, 3, 28, 28), "high_res_pixel_values": randn(1, 3, 64, 64)}


def _qwen3_asr(config: Any) -> tuple[int, int, Tensors]:
    config.audio_token_id = 200
    sizes = {"num_mel_bins": 16, "max_source_positions": 50, "n_window": 50, "n_window_infer": 100}
    config.audio_config.update({**sizes, "downsample_hidden_size": 16})
    return 200, 13, {"input_features": randn(1, 16, 100), "input_features_mask": torch.ones(1, 100, dtype=torch.long)}


def _aria(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = config.image_token_index = 200
    config.projector_patch_to_query_dict = {4: 3}
    config.vision_config.update({"image_size": 28, "patch_size": 14})
    return 200, 3, {"pixel_values": randn(1, 3, 28, 28), "pixel_mask": torch.ones(1, 28, 28, dtype=torch.bool)}


def _lfm2(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = 200
    config.vision_config.update({"patch_size": 14, "num_patches": 64})
    shapes = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int32)}
    return 200, 4, {"pixel_values": randn(1, 16, 3 * 14 * 14), **shapes}


def _nemotron_image(config: Any) -> tuple[int, int, Tensors]:
    config.image_token_id = 200
    config.vision_config.update({"patch_size": 14, "patch_dim": 3 * 14 * 14, "video_patch_dim": 6 * 14 * 14})
    config.vision_config.update({"max_img_size": 112})
    return 200, 4, {"pixel_values": randn(16, 3 * 14 * 14), "image_grid_hw": torch.tensor([[4, 4]])}


def _nemotron_audio(config: Any) -> tuple[int, int, Tensors]:
    config.audio_token_id = 200
    config.audio_config = packed_config(CONFIG_MAPPING["parakeet_encoder"])
    config.audio_config.update({"num_mel_bins": 32, "subsampling_conv_channels": 16, "attention_bias": False})
    config.audio_config.update({"scale_input": False, "projection_hidden_size": 64, "projection_bias": False})
    mask = torch.ones(1, 41, dtype=torch.bool)
    return 200, 6, {"input_features": randn(1, 41, 32), "input_features_mask": mask}


class Case(NamedTuple):
    """An item of one kind for a type."""

    name: str
    kind: MediaKind
    make: Maker
    """Changes the configuration; gives the placeholder's id, the number of features and the tensors of an item."""


CASES = (
    Case("llama4", "image", _llama4),
    Case("granite_speech", "audio", _granite_speech),
    Case("granite_speech_plus", "audio", _granite_speech),
    Case("glm_ocr", "image", _grid(14)),
    Case("glmga", "image", _grid(14, image_size=112)),
    Case("cosmos3_omni", "image", _grid(16, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])),
    Case("cosmos3_edge", "image", _grid(16, 1)),
    Case("hunyuan_vl", "image", _grid(14, 1, 8)),
    Case("cohere2_vision", "image", _square(28, 14, 2, 2, downsample_factor=2)),
    Case("got_ocr2", "image", _square(64, 16, 1)),
    Case("video_llava", "image", _square(28, 14, 4)),
    Case("shieldgemma2", "image", _square(32, 8, 16, mm_tokens_per_image=16)),
    Case("step3p7", "image", _square(28, 14, 1)),
    Case("deepseek_vl_hybrid", "image", _hybrid),
    Case("qwen3_asr", "audio", _qwen3_asr),
    Case("aria", "image", _aria),
    Case("kimi_k25", "image", _kimi),
    Case("lfm2_vl", "image", _lfm2),
    Case("nemotron_h_omni", "image", _nemotron_image),
    Case("nemotron_h_omni", "audio", _nemotron_audio),
    Case("phi4_multimodal", "image", _phi4_image),
    Case("phi4_multimodal", "audio", _phi4_audio),
)


@pytest.mark.parametrize(
    "case",
    [case if case.name == "llama4" else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: f"{case.name}-{case.kind}",
)
def test_features_equal_the_library(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's forward of Llama 4 reads an attribute that its decoder's output lacks.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    config = packed_config(CONFIG_MAPPING[case.name])
    token, count, tensors = case.make(config)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    reference: Any = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu", max_model_len=64)
    encoder = load_media_encoder(check_model_folder(tmp_path), model.spec)
    ids = torch.tensor([5, 6, 7, *[token] * count, 8, 9, 10, 11, 12])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)[None], "use_cache": False, "return_dict": False}
    rope = None
    if model.spec.rope_axes:
        options["mm_token_type_ids"] = (ids[None] == token).long()
        layout = {name: value.numpy() for name, value in tensors.items() if name == "image_grid_thw"}
        rope = encoder.positions(ids, [layout])[0]
    if model.spec.bidirectional:
        options["token_type_ids"] = (ids[None] == token).long()
    with torch.no_grad():
        expected = reference(input_ids=ids[None], **options, **tensors)[0][0]
    features = encoder.encode([PreparedItem(case.kind, token, count, tensors)])[0]
    prompt = Prompt(ids, runs(list(range(3, 3 + count))), features, rope)
    got = logits_of(model, [prompt], torch.tensor([token]))[0]
    scale = 1.0
    if case.name in SCALED:
        scale = float((got * expected).sum() / (got * got).sum())
    torch.testing.assert_close(got * scale, expected, atol=1e-4, rtol=0)
