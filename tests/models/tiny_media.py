"""Small random checkpoints with processors: every family of models that reads images or audio, in a few kilobytes.

`save_media("qwen2_vl", folder)` writes model, tokenizer and processor as a Hugging Face folder and returns the model.
Tokens are bytes; each family's own special tokens follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from batchgen.models.library.media_config import processor_class
from tests.models.tiny_packed import packed_config

SIZE = 320
"""Tokens of the vocabulary: 256 bytes, then special ones."""


def byte_tokenizer(specials: list[str], named: Mapping[str, str]) -> Any:
    """Tokenizer of bytes and `specials`, which have the ids from 256 on; `named` are attributes such as image_token."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=specials[0], eos_token=specials[0], extra_special_tokens=dict(named)
    )


@dataclass(frozen=True)
class Family:
    """How a family's small checkpoint is made."""

    processor: Callable[[Any], Any]
    """Its processor, from a tokenizer."""
    tokens: list[str]
    """Special tokens after `<pad>`, from id 257 on."""
    ids: Mapping[str, str]
    """Fields of the configuration -> the token whose id they hold."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer -> token."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Towers that the configuration leaves out by default -> their type."""
    change: Callable[[Any], None] = lambda config: None
    """Further changes of the configuration."""
    kinds: tuple[str, ...] = ("image",)
    ends: tuple[str, str] = ("", "")
    """What precedes and follows an image in a prompt."""
    ends_differ: bool = False
    """Whether the token that ends an item has the id of a feature here, and its own in the library."""
    several: bool = True
    """Whether the library's processor takes several items in a prompt."""
    refused: str = ""
    """Why its processor is refused."""
    pads: bool = False
    """Whether the library's features of a sound depend on a longer one next to it, whose length it is padded to."""
    model_type: str | None = None
    """Type of the checkpoint, if it is not the family's name."""


def without_videos(cls: str, **parts: Any) -> Any:
    """A processor whose processor of videos, which needs torchvision, is none."""
    found: Any = getattr(transformers, cls)
    body = {"check_argument_for_proper_class": lambda self, name, given: None, "__module__": found.__module__}
    reduced: Any = type(cls, (found,), body)
    return reduced(video_processor=None, **parts)


def qwen_images(patch: int = 14, least: int = 28 * 28, most: int = 28 * 28 * 12) -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, patch_size=patch, merge_size=2, temporal_patch_size=2
    )


def qwen_vl(cls: str, patch: int = 14) -> Callable[[Any], Any]:
    return lambda tokenizer: without_videos(cls, image_processor=qwen_images(patch), tokenizer=tokenizer)


def whisper(**options: Any) -> Any:
    return transformers.WhisperFeatureExtractor(**{"feature_size": 16, "chunk_length": 1, **options})


def omni(tokenizer: Any) -> Any:
    return without_videos(
        "Qwen2_5OmniProcessor",
        image_processor=qwen_images(),
        feature_extractor=whisper(),
        tokenizer=tokenizer,
    )


def _gemma3(tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=16)


def _gemma4(tokenizer: Any) -> Any:
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    sounds = transformers.Gemma4AudioFeatureExtractor()
    return without_videos("Gemma4Processor", image_processor=images, feature_extractor=sounds, tokenizer=tokenizer)


def llava(tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


GRID = [[28, 56], [56, 28], [56, 56]]
"""Resolutions that images are cut into tiles for."""


def _llava_next(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=GRID
    )
    return transformers.LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_onevision(tokenizer: Any) -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=GRID)
    return without_videos(
        "LlavaOnevisionProcessor",
        image_processor=images,
        tokenizer=tokenizer,
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    )


def _internvl(tokenizer: Any) -> Any:
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4)
    return without_videos("InternVLProcessor", image_processor=images, tokenizer=tokenizer, image_seq_length=1)


def _pixtral(tokenizer: Any) -> Any:
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})
    return processor_class("PixtralProcessor")(
        image_processor=images, tokenizer=tokenizer, patch_size=14, spatial_merge_size=2
    )


def _idefics3(tokenizer: Any) -> Any:
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 84}, max_image_size={"longest_edge": 28})
    return transformers.Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=1)


def _qwen2_audio(tokenizer: Any) -> Any:
    return transformers.Qwen2AudioProcessor(feature_extractor=whisper(), tokenizer=tokenizer)


def vision(size: int | None = None, patch: int | None = None, **others: Any) -> Callable[[Any], None]:
    """Change fields of the vision tower."""
    given = {"image_size": size, "patch_size": patch, **others}

    def change(config: Any) -> None:
        for name, value in given.items():
            if value is not None:
                setattr(config.vision_config, name, value)

    return change


def audio(**given: Any) -> Callable[[Any], None]:
    """Change fields of the audio tower."""

    def change(config: Any) -> None:
        for name, value in given.items():
            setattr(config.audio_config, name, value)

    return change


def all_of(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for one in changes:
            one(config)

    return change


def fields(**given: Any) -> Callable[[Any], None]:
    """Change fields of the whole configuration."""

    def change(config: Any) -> None:
        for name, value in given.items():
            setattr(config, name, value)

    return change


IMAGE = {"image_token_id": "<image>", "image_token_index": "<image>"}
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
OMNI_TOKENS = [
    "<|VISION_BOS|>",
    "<|VISION_EOS|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
]
OMNI_NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|VISION_BOS|>",
    "vision_eos_token": "<|VISION_EOS|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
OMNI_IDS = {
    "image_token_id": "<|IMAGE|>",
    "audio_token_id": "<|AUDIO|>",
    "video_token_id": "<|VIDEO|>",
    "vision_start_token_id": "<|VISION_BOS|>",
    "vision_end_token_id": "<|VISION_EOS|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
GEMMA_NAMES = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
GEMMA_IDS = {
    "image_token_id": "<image_soft_token>",
    "image_token_index": "<image_soft_token>",
    "boi_token_id": "<start_of_image>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_id": "<end_of_image>",
    "eoi_token_index": "<end_of_image>",
    "audio_token_id": "<audio_soft_token>",
    "boa_token_id": "<start_of_audio>",
    "eoa_token_id": "<end_of_audio>",
}
INTERN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(qwen_vl("Qwen2VLProcessor"), QWEN_TOKENS, QWEN_IDS),
    "qwen2_5_vl": Family(qwen_vl("Qwen2_5_VLProcessor"), QWEN_TOKENS, QWEN_IDS),
    "qwen3_vl": Family(
        qwen_vl("Qwen3VLProcessor", 16),
        QWEN_TOKENS,
        QWEN_IDS,
        change=vision(num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    "qwen2_5_omni_thinker": Family(
        omni,
        OMNI_TOKENS,
        OMNI_IDS,
        OMNI_NAMES,
        change=all_of(
            audio(num_mel_bins=16, max_source_positions=50, n_window=5),
            fields(vision_start_token_id=257, vision_end_token_id=258, audio_start_token_id=261),
        ),
        kinds=("image", "audio"),
    ),
    "qwen2_audio": Family(
        _qwen2_audio,
        ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
        {"audio_token_id": "<|AUDIO|>", "audio_token_index": "<|AUDIO|>"},
        change=audio(num_mel_bins=16, max_source_positions=50),
        kinds=("audio",),
    ),
    "gemma3": Family(
        _gemma3,
        list(GEMMA_NAMES.values()),
        GEMMA_IDS,
        GEMMA_NAMES,
        change=all_of(vision(32, 8), fields(mm_tokens_per_image=16)),
    ),
    "gemma4": Family(
        _gemma4,
        list(GEMMA_NAMES.values()),
        GEMMA_IDS,
        GEMMA_NAMES,
        parts={"vision_config": "gemma4_vision", "audio_config": "gemma4_audio"},
        change=vision(None, 4),
        kinds=("image", "audio"),
    ),
    "gemma4_runs": Family(
        _gemma4,
        list(GEMMA_NAMES.values()),
        GEMMA_IDS,
        GEMMA_NAMES,
        parts={"vision_config": "gemma4_vision", "audio_config": "gemma4_audio"},
        change=all_of(
            vision(None, 4), lambda config: setattr(config.text_config, "use_bidirectional_attention", "vision")
        ),
        kinds=("image", "audio"),
        model_type="gemma4",
    ),
    "llava": Family(llava, ["<image>"], IMAGE, change=vision(28, 14)),
    "llava_next": Family(
        _llava_next, ["<image>"], IMAGE, change=all_of(vision(28, 14), fields(image_grid_pinpoints=GRID))
    ),
    "llava_onevision": Family(
        _llava_onevision,
        ["<image>", "<video>"],
        {**IMAGE, "video_token_id": "<video>", "video_token_index": "<video>"},
        change=all_of(vision(28, 14), fields(image_grid_pinpoints=GRID)),
    ),
    "internvl": Family(
        _internvl,
        list(INTERN_NAMES.values()),
        {"image_token_id": "<IMG_CONTEXT>"},
        INTERN_NAMES,
        change=all_of(vision([28, 28], [14, 14]), fields(image_seq_length=1)),
    ),
    "mistral3": Family(
        _pixtral,
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
        change=all_of(vision(112, 14), fields(spatial_merge_size=2)),
    ),
    "idefics3": Family(
        _idefics3, IDEFICS, {"image_token_id": "<image>"}, change=all_of(vision(28, 14), fields(scale_factor=2))
    ),
}
"""Family -> how its small checkpoint is made."""


def family_of(name: str) -> Family:
    """A family of `FAMILIES`, `MORE` or `REFUSED`."""
    from tests.models.tiny_media_more import MORE, REFUSED

    return {**FAMILIES, **MORE, **REFUSED}[name]


def media_config(name: str) -> PreTrainedConfig:
    """Small configuration of a family, with the ids of its tokens."""
    family = family_of(name)
    config = packed_config(CONFIG_MAPPING[family.model_type or name])
    for part_name, model_type in family.parts.items():
        setattr(config, part_name, packed_config(CONFIG_MAPPING[model_type]))
    at = {token: 257 + index for index, token in enumerate(family.tokens)}
    pending = [config]
    while pending:
        part = pending.pop()
        if getattr(part, "vocab_size", None) == 256:
            part.vocab_size = SIZE
        if getattr(part, "vocab_size_per_layer_input", None) == 256:
            part.vocab_size_per_layer_input = SIZE
        for name_, token in family.ids.items():
            if hasattr(part, name_):
                setattr(part, name_, at[token])
        pending += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]
    family.change(config)
    return config


def save_media(name: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """Write a family's checkpoint; returns the model, float32 with eager attention, and the library's processor."""
    family = family_of(name)
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(media_config(name), attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():  # constant ones would hide one that is not read
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(["<pad>", *family.tokens], family.named)
    processor = family.processor(tokenizer)
    if getattr(processor, "video_processor", 0) is None:
        processor.get_attributes = lambda: [n for n in type(processor).get_attributes() if n != "video_processor"]
    transformers.ProcessorMixin.save_pretrained(processor, folder)
    return model, processor
