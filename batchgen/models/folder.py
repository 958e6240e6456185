"""A model folder on disk, checked before a weight is read: configuration, weight files, headers, digest.

Imports no torch, so that a folder that is missing or half copied is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.safetensors_header import TensorInfo, read_header, sample_tensors

__all__ = ["ModelFolder", "check_model_folder", "resolve_model"]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_SECONDS: Final = 5.0
"""Longest wait for the hub to answer at all, before any download."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder whose configuration parses and whose weight files are whole."""

    path: Path
    config: Mapping[str, Any]
    """config.json."""
    files: tuple[Path, ...]
    """The safetensors files, in the order of their names."""
    tensors: Mapping[str, TensorInfo]
    """By name, over all files."""
    digest: str
    """sha256 over config.json, the names, sizes and headers of the files, and samples of their weights."""

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self.config["model_type"])


def resolve_model(path_or_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a local path or of a Hugging Face hub id.

    An id is looked for in the local cache first; the network is asked only where Hugging Face's own settings
    (`HF_HUB_OFFLINE`) allow it.

    Raises:
        ModelError: neither a folder nor an id that can be had.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is not a folder. Name the folder that holds config.json and the safetensors files.")
    name = os.fspath(path_or_id)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no model folder {path}. Check the path.")
    return _from_hub(name, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    # Only for hub ids: the import costs a third of a second that a local folder does not need.
    import huggingface_hub
    from huggingface_hub import errors

    def snapshot(local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, local_files_only=local, allow_patterns=_HUB_FILES
            )
        )

    try:
        return snapshot(local=True)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ValueError):
        pass
    refusal = f"There is no folder {name}, and no hub model of that name"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{refusal} in the local cache (HF_HUB_OFFLINE is set). Download it first, or name a folder.")
    try:
        # Asked first, because a download retries for minutes where there is no network.
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
        return snapshot(local=False)
    except Exception as error:  # the client raises its transport's errors, whatever that is
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ModelError(f"{refusal} can be had: {reason}. Check the name, or name a local folder.") from None


def check_model_folder(path: str | os.PathLike[str], revision: str | None = None) -> ModelFolder:
    """Everything that can be said against a folder without reading a weight or knowing the architecture.

    Raises:
        ModelError: what is missing or damaged, and the remedy.
    """
    folder = resolve_model(path, revision)
    raw, config = _read_config(folder)
    _refuse_config(folder, config)
    index, files = _weight_files(folder)
    digest = hashlib.sha256(raw)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        held, header = read_header(file)
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + header)
        if double := tensors.keys() & held.keys():
            raise ModelError(f"{min(double)} stands in two files of {folder}, {file.name} and another. Remove one.")
        tensors.update(held)
    for sample in sample_tensors(tensors):
        digest.update(sample)
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            raise ModelError(f"{file} lacks {name}, which {_INDEX} says it holds. Copy the folder again.")
    return ModelFolder(folder, config, tuple(files), tensors, digest.hexdigest())


def _read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json. Name a Hugging Face model folder, or copy it again.")
    try:
        raw = file.read_bytes()
        config = json.loads(raw)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}). Copy the file again.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{file} names no model_type, so the architecture is not known. Use a Hugging Face checkpoint."
        )
    return raw, config


def _refuse_config(folder: Path, config: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        entry = config.get(key)
        if entry:
            method = entry.get("quant_method", "unnamed") if isinstance(entry, dict) else entry
            raise ModelError(
                f"{folder} is quantised ({key}: {method}), which is not supported. Use the unquantised checkpoint."
            )


def _weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """The index's tensor -> file (empty for a single file), and the files. A single file goes first, as elsewhere."""
    if (folder / _SINGLE).is_file():
        return {}, [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    try:
        weight_map = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        index = {str(name): folder / str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{folder / _INDEX} is not an index of weights. Copy the file again.") from None
    files = sorted(set(index.values()))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files, {missing[0]} first. "
            "Copy the folder again."
        )
    return index, files


def _no_weights(folder: Path) -> ModelError:
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return ModelError(
            f"{folder} holds PyTorch pickles, which can run code, and no safetensors. Convert it once with "
            "transformers: from_pretrained(...) and save_pretrained(...)."
        )
    if any(folder.glob("*.gguf")):
        return ModelError(f"{folder} holds GGUF weights. Use the checkpoint in safetensors form.")
    if (folder / "adapter_config.json").is_file():
        return ModelError(f"{folder} is an adapter, not a model. Name its base model's folder.")
    return ModelError(f"{folder} has no {_SINGLE} or {_INDEX}. Copy the folder again.")
