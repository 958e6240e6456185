"""The packaged demonstration model, a small chat model that reads pictures (LLaVA around a Llama), and an adapter."""

from __future__ import annotations

from pathlib import Path

__all__ = ["adapter_path", "model_path", "named_model"]


def model_path() -> Path:
    """Folder of the packaged model, in Hugging Face's layout."""
    return Path(__file__).resolve().parent / "model"


def adapter_path() -> Path:
    """Folder of the packaged LoRA adapter, in peft's layout; it makes the model answer in JSON."""
    return Path(__file__).resolve().parent / "adapter"


def named_model(name: str | None) -> str | Path:
    """The packaged model, for no name and for `demo` where no file has it; else the name."""
    return model_path() if name is None or (name == "demo" and not Path(name).exists()) else name
