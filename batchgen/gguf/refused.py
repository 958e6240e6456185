"""Architectures of GGUF files that are not read, and the computation that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_REASONS: Final[Mapping[str, str]] = {
    "it keeps a recurrent state in addition to keys and values": (
        "qwen3next qwen35 qwen35moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 mamba mamba2 jamba nemotron_h nemotron_h_moe "
        "granitehybrid falcon-h1 lfm2 lfm2moe kimi-linear plamo2"
    ),
    "it is an encoder, or needs one": (
        "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
        "llama-embed t5 t5encoder"
    ),
    "it denoises blocks of tokens instead of writing them in order": "dream llada llada-moe rnd1",
    "it selects the keys of its attention by a learned index": "glm-dsa",
    "its attention weights keys by their distance (ALiBi), not by rotated positions": "bloom mpt refact jais",
    "its attention in transformers does not go through the library's attention interface": "falcon",
    "its layers have different numbers of heads, and some have no attention": "deci openelm",
    "it encodes images or sounds, and writes no text": "clip wavtokenizer-dec",
    "its images are read by a separate set of weights in each layer": "cogvlm",
    "the installed transformers has no class with its computation": (
        "grok gptj plamo plamo3 codeshell orion arctic deepseek plm bailingmoe smallthinker grovemoe maincoder bitnet"
    ),
}
MISSING: Final = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""`general.architecture` -> the missing computation."""
