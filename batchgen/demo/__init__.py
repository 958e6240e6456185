"""The demonstration model: a small Llama-shaped chat model, trained from nothing by this package's own script."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder of the packaged model: config, tokenizer and weights in the Hugging Face layout."""
    return Path(__file__).resolve().parent / "model"
