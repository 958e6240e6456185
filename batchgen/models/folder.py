"""Model folder on disk: configuration, weight files and headers, checked before any weight is read.

Does not import torch, so that a missing or incomplete folder is rejected immediately.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.file_hashes import FileStamp
from batchgen.models.hub import read_weight_map, resolve_model
from batchgen.models.quant_format import QuantFormat, find_quant_format
from batchgen.models.quantized.formats import PlainTensors, plain_tensors
from batchgen.models.quantized.tensors import StoredTensor
from batchgen.models.safetensors_header import TensorInfo, read_header
from batchgen.request.foreign_text import ForeignTextError, Kinds, file_content, read_json, typed

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder whose configuration parses and whose weight files are complete."""

    path: Path
    config: Mapping[str, Any]
    """Contents of config.json."""
    files: tuple[Path, ...]
    """Safetensors files, sorted by name."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of all files as a model takes them, by name."""
    config_digest: str
    """sha256 of config.json; of quantised checkpoints, of it and the description of their quantisation."""
    stamps: Mapping[Path, FileStamp]
    """Stamps of config.json and the safetensors files, taken before they were read."""
    quantisation: QuantFormat | None = None
    """None if the weights are stored in full."""
    plain: PlainTensors | None = None
    """What the quantised tensors mean; None if the weights are stored in full."""

    @property
    def spare(self) -> frozenset[str]:
        """Tensors that a model may lack."""
        return frozenset() if self.plain is None else self.plain.spare

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self.config["model_type"])


def check_model_folder(path: str | os.PathLike[str], revision: str | None = None) -> ModelFolder:
    """Check a folder's configuration, files and headers, independent of the architecture.

    Raises:
        ModelError: the message names what is missing or damaged, and the remedy.
    """
    folder = resolve_model(path, revision)
    # Before the file is read, so that a change while it is read shows.
    stamps = {file: FileStamp.of(file.stat()) for file in [folder / "config.json"] if file.is_file()}
    raw, config = _read_config(folder)
    index, files = _weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        held, stamps[file] = read_header(file)
        if double := tensors.keys() & held.keys():
            raise ModelError(f"{min(double)} is stored in two files of {folder}, {file.name} and another. Remove one.")
        tensors.update(held)
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            raise ModelError(f"{file} lacks {name}, which {_INDEX} says it holds. Copy the folder again.")
    found = find_quant_format(folder, config, tensors)
    if found is None:
        return ModelFolder(folder, config, tuple(files), tensors, hashlib.sha256(raw).hexdigest(), stamps)
    plain = plain_tensors(tensors, found)
    form = found if plain.labels else None
    # Of a description in another file, too, so that its change makes another job.
    digest = hashlib.sha256(raw + json.dumps([found.method, dict(found.settings)], sort_keys=True).encode()).hexdigest()
    return ModelFolder(folder, config, tuple(files), plain.tensors, digest, stamps, form, plain if form else None)


_CONFIG: Final[Kinds] = {
    "model_type": (str, NoneType),
    "architectures": (list, NoneType),
    "layer_types": (list, NoneType),
    "text_config": (dict, NoneType),
    "auto_map": (dict, NoneType),
}
"""Types in config.json, of the keys that every model is looked at by."""


def _read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json. Name a Hugging Face model folder, or copy it again.")
    try:
        raw = file_content(file)
        config = typed(read_json(raw), _CONFIG)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None
    except ForeignTextError as error:
        raise ModelError(f"{file} {error}. Copy the file again.") from None
    if not config.get("model_type"):
        raise ModelError(
            f"{file} names no model_type, so the architecture is not known. Use a Hugging Face checkpoint."
        )
    return raw, config


def _weight_files(folder: Path) -> tuple[dict[str, Path], list[Path]]:
    """The index (tensor -> file, empty for a single file) and the files; a single file has precedence over an index."""
    if (folder / _SINGLE).is_file():
        return {}, [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    try:
        index = {name: folder / shard for name, shard in read_weight_map(folder / _INDEX).items()}
    except (OSError, ForeignTextError) as error:
        raise ModelError(f"{folder / _INDEX} is not an index of weights ({error}). Copy the file again.") from None
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
