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
    change: Callable[[Any], None] = lambda config: None
    """Further changes of the configuration."""
    kinds: tuple[str, ...] = ("image",)
    model_type: str | None = None
    """Type of the checkpoint, if it is not the family's name."""


def _qwen_vl(cls: str = "Qwen2VLProcessor", patch: int = 14) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
        images = transformers.Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=2, temporal_patch_size=2)
        return without_videos(cls, images, tokenizer)

    return make


def without_videos(cls: str, images: Any, tokenizer: Any, **options: Any) -> Any:
    """A processor whose processor of videos, which needs torchvision, is none."""
    found: Any = getattr(transformers, cls)
    body = {"check_argument_for_proper_class": lambda self, name, given: None, "__module__": found.__module__}
    reduced: Any = type(cls, (found,), body)
    return reduced(image_processor=images, tokenizer=tokenizer, video_processor=None, **options)


def _square(cls: str, size: int = 28, **options: Any) -> Any:
    return getattr(transformers, cls)(
        size={"height": size, "width": size}, crop_size={"height": size, "width": size}, **options
    )


def _vision(size: int, patch: int, **others: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in {"image_size": size, "patch_size": patch, **others}.items():
            setattr(config.vision_config, name, value)

    return change


def _llava(tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


IMAGE = {"image_token_id": "<image>", "image_token_index": "<image>"}
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(_qwen_vl(), QWEN_TOKENS, QWEN_IDS),
    "llava": Family(_llava, ["<image>"], IMAGE, change=_vision(28, 14)),
}
"""Family -> how its small checkpoint is made."""


def media_config(name: str) -> PreTrainedConfig:
    """Small configuration of a family, with the ids of its tokens."""
    family = FAMILIES[name]
    config = packed_config(CONFIG_MAPPING[family.model_type or name])
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


def save_media(name: str, folder: Path) -> PreTrainedModel:
    """Write a family's checkpoint with tokenizer and processor; returns the model, float32 with eager attention."""
    family = FAMILIES[name]
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(media_config(name), attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # initialisers make these constant, which would hide one that is not read
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(["<pad>", *family.tokens], family.named)
    processor = family.processor(tokenizer)
    if getattr(processor, "video_processor", 0) is None:
        processor.get_attributes = lambda: [n for n in type(processor).get_attributes() if n != "video_processor"]
    processor.save_pretrained(folder)
    return model
