"""Model folder on disk: configuration, weight files and headers, checked before any weight is read.

Does not import torch, so that a missing or incomplete folder is rejected immediately.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.gguf.config import gguf_config
from batchgen.gguf.header import read_gguf
from batchgen.gguf.tensors import GgufForm, HubTensor, hub_tensors
from batchgen.models.checkpoint.file_hashes import FileStamp
from batchgen.models.checkpoint.model_files import find_weight_files, foreign_form, resolve_model, unread_note
from batchgen.models.checkpoint.overrides import NO_OVERRIDES, Overrides
from batchgen.models.checkpoint.pickled_weights import read_pickle_header
from batchgen.models.checkpoint.quant_format import QuantFormat, find_quant_format
from batchgen.models.checkpoint.quantized_formats import PlainTensors, plain_tensors
from batchgen.models.checkpoint.quantized_tensors import AssembledTensor, StoredTensor
from batchgen.models.checkpoint.safetensors_header import TensorInfo, read_header
from batchgen.request.foreign_text import ForeignTextError, Kinds, file_content, read_json, typed

TYPE_ALIASES: Final = {"kimi_k2": "deepseek_v3"}
"""Types that transformers does not have by name -> the type of the same configuration and computation."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model folder whose configuration parses and whose weight files are complete."""

    path: Path
    """The folder; of a GGUF model its first file."""
    config: Mapping[str, Any]
    """Contents of config.json, or what they would be, with the `model_type` of transformers."""
    files: tuple[Path, ...]
    """Files with weights, sorted by name."""
    tensors: Mapping[str, StoredTensor]
    """Tensors of all files as a model takes them, by name."""
    config_digest: str
    """sha256 of config.json; of quantised checkpoints, of it and the description of their quantisation; of GGUF files,
    of their headers.
    """
    stamps: Mapping[Path, FileStamp]
    """Stamps of config.json and the files with weights, taken before they were read."""
    quantisation: QuantFormat | None = None
    """None if the weights are stored in full."""
    plain: PlainTensors | None = None
    """What the quantised tensors mean; None if the weights are stored in full."""
    is_gguf: bool = False
    """Whether the weights are in GGUF files, and the configuration in their metadata."""
    overrides: Overrides = NO_OVERRIDES
    """What has replaced values of the configuration."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the index names and that are not stored -> name of the file that it names."""
    note: str | None = None
    """What a user should know of the files, in one line."""

    @property
    def spare(self) -> frozenset[str]:
        """Tensors that a model may lack."""
        return frozenset() if self.plain is None else self.plain.spare

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self.config["model_type"])


def check_model_folder(
    path: str | os.PathLike[str],
    revision: str | None = None,
    overrides: Overrides = NO_OVERRIDES,
    *,
    pickles: bool = False,
) -> ModelFolder:
    """Check a folder's configuration, files and headers, independent of the architecture.

    Args:
        path: the folder, a GGUF file, or an id.
        revision: of an id.
        overrides: replace values of the configuration before anything else reads it.
        pickles: whether weights may be in PyTorch's files, read by its restricted reader.

    Raises:
        ModelError: the message names what is missing or damaged, and the remedy.
    """
    folder = resolve_model(path, revision)
    if folder.is_file():
        return _gguf_folder(folder, overrides)
    # Before the file is read, so that a change while it is read shows.
    stamps = {file: FileStamp.of(file.stat()) for file in [folder / "config.json"] if file.is_file()}
    raw, config = _read_config(folder, overrides)
    index, files = find_weight_files(folder, pickles=pickles)
    tensors = _read_headers(folder, index, files, stamps)
    absent = {name: file.name for name, file in index.items() if name not in tensors}
    modules = {name.rpartition(".")[0] for name in tensors}
    if part := next((name for name in absent if name.rpartition(".")[0] in modules), None):
        raise ModelError(
            f"{folder} lacks {part}, a part of a layer whose other parts are stored{placed(part, absent)}. "
            "Copy the folder again."
        )
    note, digest = unread_note(folder, index), hashlib.sha256(raw).hexdigest()
    model = ModelFolder(
        folder, config, tuple(files), tensors, digest, stamps, overrides=overrides, absent=absent, note=note
    )
    form = find_quant_format(folder, config, tensors)
    if form is None:
        return model
    plain = plain_tensors(tensors, form)
    # Of a description in another file, too, so that its change makes another job.
    digest = hashlib.sha256(raw + json.dumps([form.method, dict(form.settings)], sort_keys=True).encode()).hexdigest()
    model = replace(model, tensors=plain.tensors, config_digest=digest)
    return replace(model, quantisation=form, plain=plain) if plain.labels else model


def _read_headers(
    folder: Path, index: Mapping[str, Path], files: Sequence[Path], stamps: dict[Path, FileStamp]
) -> dict[str, TensorInfo]:
    """Tensors of all files by name, without those that the index has in another file; adds the files' stamps."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        held, stamps[file] = read_pickle_header(file) if file.suffix == ".bin" else read_header(file)
        held = {name: info for name, info in held.items() if index.get(name, file) == file}
        if double := tensors.keys() & held.keys():
            raise ModelError(f"{min(double)} is stored in two files of {folder}, {file.name} and another. Remove one.")
        tensors.update(held)
    return tensors


def placed(name: str, absent: Mapping[str, str]) -> str:
    """The file that should hold an absent tensor, as a part of a sentence; empty for any other."""
    return f", which its index places in {absent[name]}" if name in absent else ""


def _gguf_folder(path: Path, overrides: Overrides) -> ModelFolder:
    """A GGUF model as the folder of its checkpoint: configuration and tensors by the names that they have there."""
    header = read_gguf(path)
    config = gguf_config(header)
    stored = hub_tensors(header, config)
    config = overrides.merged(config)
    tensors: dict[str, StoredTensor] = {}
    encodings: Counter[str] = Counter()
    for name, tensor in stored.items():
        tensors[name] = _as_stored(tensor)
        encodings.update(entry.kind for entry, _ in tensor.parts if entry.kind not in _PLAIN)
    stamps = {file: FileStamp.of(status) for file, status in header.status.items()}
    return ModelFolder(
        header.path,
        config,
        header.files,
        tensors,
        hashlib.sha256(_with_overrides(header.digest.encode(), overrides)).hexdigest() if overrides else header.digest,
        stamps,
        plain=PlainTensors("gguf", tensors, dict(encodings.most_common()), frozenset()) if encodings else None,
        is_gguf=True,
        overrides=overrides,
    )


def _as_stored(tensor: HubTensor) -> StoredTensor:
    parts = []
    for entry, form in tensor.parts:
        plain = form == _PLAIN.get(entry.kind)
        dtype = entry.kind if plain else "F32"  # that of the decoded values
        parts.append(TensorInfo(entry.file, dtype, entry.shape, entry.start, entry.nbytes, None if plain else form))
    made = tensor.assembly
    if made is None:
        return parts[0]
    named = dict(zip(made.parts, parts, strict=True))
    order = (tensor.matrices, made.axis, made.alternating, made.transposed)
    return AssembledTensor(tensor.shape, named, "parts", *order)


_PLAIN: Final = {kind: GgufForm(kind) for kind in ("F16", "BF16", "F32", "F64")}
"""Tensors that are stored as safetensors store them."""
_CONFIG: Final[Kinds] = {
    "model_type": (str, NoneType),
    "architectures": (list, NoneType),
    "layer_types": (list, NoneType),
    "text_config": (dict, NoneType),
    "auto_map": (dict, NoneType),
}
"""Types in config.json, of the keys that every model is looked at by."""


def _with_overrides(raw: bytes, overrides: Overrides) -> bytes:
    """Bytes that identify a configuration: its file, and what replaces values of it."""
    return raw + json.dumps(overrides.options, sort_keys=True).encode() if overrides else raw


def _read_config(folder: Path, overrides: Overrides) -> tuple[bytes, dict[str, Any]]:
    """Bytes that identify the configuration, and the configuration with the overrides."""
    file = folder / "config.json"
    if not file.is_file():
        form = foreign_form(folder)
        if form is not None:
            raise ModelError(f"{folder} {form}")
        raise ModelError(f"{folder} has no config.json. Name a Hugging Face model folder, or copy it again.")
    try:
        raw = file_content(file)
        config = typed(read_json(raw), _CONFIG)
        if overrides:
            config = typed(overrides.merged(config), _CONFIG)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None
    except ForeignTextError as error:
        raise ModelError(f"{file} {error}. Copy the file again.") from None
    if not config.get("model_type"):
        raise ModelError(
            f"{file} names no model_type, so the architecture is not known. Use a Hugging Face checkpoint."
        )
    if config["model_type"] in TYPE_ALIASES:
        config = {**config, "model_type": TYPE_ALIASES[config["model_type"]]}
    return _with_overrides(raw, overrides), config
