"""The demonstration model, a small Llama-shaped chat model, and an adapter of it, trained by this package's scripts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["adapter_path", "model_path"]


def model_path() -> Path:
    """The folder of the packaged model: config, tokenizer and weights in the Hugging Face layout."""
    return Path(__file__).resolve().parent / "model"


def adapter_path() -> Path:
    """The folder of the packaged LoRA adapter, in peft's layout: the same answers, framed as JSON."""
    return Path(__file__).resolve().parent / "adapter"
