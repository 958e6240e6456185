"""The packaged demonstration model, a small chat model that reads pictures (LLaVA around a Llama), and an adapter."""

from __future__ import annotations

from pathlib import Path

__all__ = ["adapter_path", "model_path"]


def model_path() -> Path:
    """Folder of the packaged model, in Hugging Face's layout."""
    return Path(__file__).resolve().parent / "model"


def adapter_path() -> Path:
    """Folder of the packaged LoRA adapter, in peft's layout; it makes the model answer in JSON."""
    return Path(__file__).resolve().parent / "adapter"
