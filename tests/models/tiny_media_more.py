"""Further families of `tiny_media`, which the slow tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.smolvlm import processing_smolvlm

from batchgen.models.library.media_config import with_sounds
from tests.models.tiny_media import (
    GRID,
    IMAGE,
    OMNI_IDS,
    OMNI_NAMES,
    OMNI_TOKENS,
    QWEN_IDS,
    QWEN_TOKENS,
    SIZE,
    Family,
    all_of,
    audio,
    fields,
    llava,
    omni,
    qwen_images,
    qwen_vl,
    vision,
    whisper,
    without_videos,
)

GLM = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"]
GLM_IDS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "image_token_id": "<|image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "video_token_id": "<|video|>",
}


def _library(cls: str, image_cls: str, **options: Any) -> Callable[[Any], Any]:
    """A processor of the library's class, with an image processor of square images of 28 pixels."""
    sizes = {"size": {"height": 28, "width": 28}}

    def make(tokenizer: Any) -> Any:
        own = {**sizes, **options.get("images", {})}
        made = getattr(transformers, image_cls)(**own)
        others = {key: value for key, value in options.items() if key != "images"}
        if "video_processor" in getattr(transformers, cls).get_attributes():
            return without_videos(cls, image_processor=made, tokenizer=tokenizer, **others)
        return getattr(transformers, cls)(image_processor=made, tokenizer=tokenizer, **others)

    return make


def _pixel_grid(cls: str, images: str, patch: int = 14) -> Callable[[Any], Any]:
    """A processor of images of any size, cut into patches."""

    def make(tokenizer: Any) -> Any:
        size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
        made = getattr(transformers, images)(size=size, patch_size=patch, merge_size=2)
        if "video_processor" in getattr(transformers, cls).get_attributes():
            return without_videos(cls, image_processor=made, tokenizer=tokenizer)
        return getattr(transformers, cls)(image_processor=made, tokenizer=tokenizer)

    return make


def _smolvlm(tokenizer: Any) -> Any:
    # The class wants a package that spells out numbers in descriptions of videos.
    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = str
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 84}, max_image_size={"longest_edge": 28})
    return without_videos("SmolVLMProcessor", image_processor=images, tokenizer=tokenizer, image_seq_len=1)


def _thinker(config: Any) -> None:
    """Sizes and ids of the part that reads and writes text, of a checkpoint that speaks too."""
    thinker = getattr(config, "thinker_config", config)
    audio(num_mel_bins=16, max_source_positions=50, n_window=50, n_window_infer=100, downsample_hidden_size=16)(thinker)
    for holder in (config, thinker):
        fields(vision_start_token_id=257, vision_end_token_id=258, audio_start_token_id=261)(holder)


def _qwen3_omni(tokenizer: Any) -> Any:
    return without_videos(
        "Qwen3OmniMoeProcessor",
        image_processor=qwen_images(16),
        feature_extractor=whisper(),
        tokenizer=tokenizer,
    )


class PooledPixels(PreTrainedModel):
    """A vision tower in place of Gemma 3n's, which needs the package timm: means of squares of pixels."""

    config_class = transformers.Gemma3nVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.proj = nn.Conv2d(3, config.hidden_size, 8, 8)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """[B, 3, 32, 32] -> [B, H, 4, 4]."""
        return BaseModelOutputWithPooling(last_hidden_state=self.proj(pixel_values))


def _gemma3n(tokenizer: Any) -> Any:
    return transformers.Gemma3nProcessor(
        feature_extractor=transformers.Gemma3nAudioFeatureExtractor(feature_size=32),
        image_processor=transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        audio_seq_length=12,
        image_seq_length=16,
    )


def _gemma3n_sizes(config: Any) -> None:
    transformers.AutoModel.register(transformers.Gemma3nVisionConfig, PooledPixels, exist_ok=True)
    fields(vision_soft_tokens_per_image=16, audio_soft_tokens_per_image=12)(config)
    vision(hidden_size=64, vocab_offset=259, vocab_size=2)(config)
    audio(hidden_size=64, vocab_offset=261, vocab_size=SIZE - 261, input_feat_size=32)(config)
    audio(conf_num_hidden_layers=2, conf_num_attention_heads=4, sscp_conv_channel_size=(16, 8))(config)
    config.text_config.vocab_size_per_layer_input = 259


GEMMA3N = ["boi", "boa", "eoi", "image", "eoa", "audio"]
"""Special tokens from id 257 on: from the third on, towers embed them."""
OMNI: dict[str, Any] = {"tokens": OMNI_TOKENS, "ids": OMNI_IDS, "named": OMNI_NAMES, "kinds": ("image", "audio")}
DEEP = vision(num_position_embeddings=16, deepstack_visual_indexes=[0, 1])


def _paligemma(tokenizer: Any) -> Any:
    images = transformers.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    tokenizer.bos_token = "<bos>"
    return transformers.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer)


def _granite4(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=_TILES
    )
    return transformers.Granite4VisionProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        downsample_rate="1/2",
    )


def _glm4v(cls: str, images: str) -> Callable[[Any], Any]:
    """Processors of GLM-4V and its like."""

    def make(tokenizer: Any) -> Any:
        size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 24}
        made = getattr(transformers, images)(size=size, patch_size=14, merge_size=2)
        return without_videos(cls, image_processor=made, tokenizer=tokenizer)

    return make


AYA = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"]
MORE: dict[str, Family] = {
    "qwen2_5_omni": Family(omni, change=_thinker, **OMNI),
    "qwen3_omni_moe_thinker": Family(_qwen3_omni, pads=True, change=all_of(_thinker, DEEP), **OMNI),
    "qwen3_omni_moe": Family(
        _qwen3_omni, pads=True, change=all_of(_thinker, lambda config: DEEP(config.thinker_config)), **OMNI
    ),
    "gemma3n": Family(
        _gemma3n,
        [f"<{name}>" for name in GEMMA3N],
        {f"{name}_token_id": f"<{name}>" for name in GEMMA3N},
        {f"{name}_token": f"<{name}>" for name in GEMMA3N},
        change=_gemma3n_sizes,
        kinds=("image", "audio"),
        ends_differ=True,
    ),
    "smolvlm": Family(
        _smolvlm,
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"],
        {"image_token_id": "<image>"},
        change=all_of(vision(28, 14), fields(scale_factor=2)),
    ),
    "vipllava": Family(
        llava, ["<image>"], IMAGE, change=all_of(vision(28, 14), fields(vision_feature_layers=[-2, -1]))
    ),
    "llava_next_video": Family(
        lambda tokenizer: without_videos(
            "LlavaNextVideoProcessor",
            image_processor=transformers.LlavaNextImageProcessorPil(
                size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=GRID
            ),
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        ["<image>", "<video>"],
        {**IMAGE, "video_token_id": "<video>", "video_token_index": "<video>"},
        change=all_of(vision(28, 14), fields(image_grid_pinpoints=GRID)),
    ),
    "aya_vision": Family(
        _library("AyaVisionProcessor", "GotOcr2ImageProcessorPil", img_size=28, patch_size=14, downsample_factor=1),
        AYA,
        {"image_token_id": "<|IMG_PATCH|>", "image_token_index": "<|IMG_PATCH|>"},
        change=all_of(vision(28, 14), fields(downsample_factor=1)),
    ),
    "lighton_ocr": Family(
        lambda tokenizer: transformers.LightOnOcrProcessor(
            image_processor=transformers.PixtralImageProcessorPil(
                size={"longest_edge": 112}, patch_size={"height": 28, "width": 28}
            ),
            tokenizer=tokenizer,
        ),
        ["<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"],
        {"image_token_id": "<|image_pad|>"},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        change=all_of(vision(112, 14), fields(spatial_merge_size=2)),
    ),
    "video_llama_3": Family(
        _pixel_grid("VideoLlama3Processor", "VideoLlama3ImageProcessorPil"),
        ["<image>", "<video>"],
        {"image_token_id": "<image>", "video_token_id": "<video>"},
        {"image_token": "<image>", "video_token": "<video>"},
        change=vision(None, 14),
    ),
    "ovis2": Family(
        _library(
            "Ovis2Processor",
            "Ovis2ImageProcessorPil",
            image_seq_length=4,
            images={"crop_to_patches": True, "max_patches": 4},
        ),
        ["<image>", "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
        {"image_token_id": "<IMG_ATOM>"},
        change=vision(28, 14),
    ),
    "glm46v": Family(_glm4v("Glm46VProcessor", "Glm46VImageProcessorPil"), GLM, GLM_IDS, change=vision(112, 14)),
    "glm4v": Family(_glm4v("Glm4vProcessor", "Glm4vImageProcessorPil"), GLM, GLM_IDS, change=vision(112, 14)),
    "glm4v_moe": Family(_glm4v("Glm4vProcessor", "Glm4vImageProcessorPil"), GLM, GLM_IDS, change=vision(112, 14)),
    "qwen3_vl_moe": Family(
        qwen_vl("Qwen3VLProcessor", 16),
        QWEN_TOKENS,
        QWEN_IDS,
        change=vision(num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    "qwen3_5": Family(
        qwen_vl("Qwen3VLProcessor", 16), QWEN_TOKENS, QWEN_IDS, change=vision(num_position_embeddings=16)
    ),
    "qwen3_5_moe": Family(
        qwen_vl("Qwen3VLProcessor", 16), QWEN_TOKENS, QWEN_IDS, change=vision(num_position_embeddings=16)
    ),
    "lfm3_vl": Family(_pixel_grid("Lfm3VlProcessor", "Qwen2VLImageProcessorPil", 16), QWEN_TOKENS, QWEN_IDS),
    "exaone4_5": Family(
        qwen_vl("Exaone4_5_Processor"),
        ["<|image_pad|>", "<|video_pad|>"],
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        change=vision(None, 14),
    ),
    "hyperclovax_vision_v2": Family(
        qwen_vl("HyperCLOVAXVisionV2Processor"),
        ["<|IMAGE_PAD|>", "<|VIDEO_PAD|>"],
        {"image_token_id": "<|IMAGE_PAD|>", "video_token_id": "<|VIDEO_PAD|>"},
        {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
        change=vision(None, 14),
    ),
    "paddleocr_vl": Family(
        _pixel_grid("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessorPil"),
        ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        {
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        change=vision(None, 14),
    ),
    "hunyuan_vl": Family(
        lambda tokenizer: transformers.HunYuanVLProcessor(
            image_processor=transformers.HunYuanVLImageProcessorPil(
                size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}, patch_size=14, merge_size=2
            ),
            tokenizer=tokenizer,
        ),
        ["<image>", "<img>", "</img>"],
        {"image_token_id": "<image>", "image_start_token_id": "<img>", "image_end_token_id": "</img>"},
        {"image_token": "<image>", "image_start_token": "<img>", "image_end_token": "</img>"},
        ends=("<img>", "</img>"),
        change=vision(None, 14),
    ),
    "cohere_compass": Family(
        _pixel_grid("CohereCompassProcessor", "CohereCompassImageProcessorPil", 16),
        ["<|IMAGE_PAD|>"],
        {"image_token_id": "<|IMAGE_PAD|>"},
        {"image_token": "<|IMAGE_PAD|>"},
    ),
    "deepseek_vl": Family(
        _library("DeepseekVLProcessor", "DeepseekVLImageProcessorPil", num_image_tokens=4),
        ["<image_placeholder>"],
        {"image_token_id": "<image_placeholder>"},
        {"image_token": "<image_placeholder>"},
        change=vision(28, 14),
    ),
    "qianfan_ocr": Family(
        _library("QianfanOCRProcessor", "GotOcr2ImageProcessorPil", image_seq_length=1, images={"max_patches": 4}),
        ["<image>", "<img>", "</img>", "<IMG_CONTEXT>"],
        {"image_token_id": "<IMG_CONTEXT>"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "image_token": "<IMG_CONTEXT>",
        },
        change=vision([28, 28], [14, 14]),
    ),
    "glmasr": Family(
        lambda tokenizer: transformers.GlmAsrProcessor(
            feature_extractor=whisper(chunk_length=2), tokenizer=tokenizer, audio_token="<|pad|>"
        ),
        ["<|pad|>"],
        {"audio_token_id": "<|pad|>"},
        change=audio(num_mel_bins=16, max_source_positions=100, intermediate_size=256),
        kinds=("audio",),
        several=False,
    ),
}
"""Family -> how its small checkpoint is made."""
_PALIGEMMA = Family(_paligemma, ["<image>", "<bos>"], IMAGE, {"image_token": "<image>"}, change=vision(28, 14))
MORE["paligemma"] = _PALIGEMMA
MORE["paligemma2"] = replace(
    _PALIGEMMA,
    parts={"text_config": "gemma2"},
    change=all_of(vision(28, 14), lambda config: setattr(config.text_config, "sliding_window", 6)),
    model_type="paligemma",
)
_TILES = [[2 * height, 2 * width] for height, width in GRID]
MORE["granite4_vision"] = Family(
    _granite4,
    ["<image>"],
    IMAGE,
    change=all_of(vision(56, 14), fields(image_grid_pinpoints=_TILES, deepstack_layer_map=[[-1, 0], [0, 2]])),
)
MORE["voxtral"] = Family(
    lambda tokenizer: with_sounds(transformers.VoxtralProcessor)(whisper(chunk_length=2), tokenizer),
    ["[AUDIO]", "[BEGIN_AUDIO]"],
    {"audio_token_id": "[AUDIO]"},
    change=audio(num_mel_bins=16, max_source_positions=100, intermediate_size=256),
    kinds=("audio",),
)

REFUSED: dict[str, Family] = {
    "idefics2": Family(
        lambda tokenizer: transformers.Idefics2Processor(
            image_processor=transformers.Idefics2ImageProcessorPil(size={"shortest_edge": 28, "longest_edge": 56}),
            tokenizer=tokenizer,
            image_seq_len=4,
        ),
        ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
        {"image_token_id": "<image>"},
        change=vision(56, 14),
        refused="its processor changes the text around images",
    ),
}
"""Families whose processor cannot be used."""
