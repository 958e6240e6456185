"""Checks of a model folder that need neither torch nor the weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from batchgen.errors import ModelError
from batchgen.models.architectures import Implementation, Requested, choose_implementation, is_encoder
from batchgen.models.checkpoint.file_hashes import FileHashes
from batchgen.models.checkpoint.folder import ModelFolder, check_model_folder
from batchgen.models.checkpoint.overrides import NO_OVERRIDES, Overrides
from batchgen.models.checkpoint.safetensors_header import TensorInfo
from batchgen.models.checkpoint.stored_tensors import tower_test
from batchgen.models.checkpoint.text_part import text_config
from batchgen.models.lora.config import Adapter, NamePath, read_adapters
from batchgen.models.lora.fit import fit_adapters
from batchgen.models.native.config import NativeConfig, parse_native_config
from batchgen.models.native.weights import NativeLayout, check_native_tensors, native_layout, native_sites

_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_STORED_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16"}
_FULL_DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model folder that passed the checks, and the implementation that will run it."""

    folder: ModelFolder
    implementation: Implementation
    native: tuple[NativeConfig, NativeLayout] | None
    """Configuration and tensor layout; None unless `implementation` is "native"."""
    stored_dtype: str
    """`dtype` of the configuration or, without one, the dtype of most stored bytes."""
    max_model_len: int | None
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters; on the native path already checked against the model's layers."""

    def hashes(self) -> FileHashes:
        """Begin to hash the weights of the model and of its adapters."""
        stamps = {**self.folder.stamps, **{adapter.weights: adapter.stamp for adapter in self.adapters}}
        return FileHashes(stamps, [*self.folder.files, *(adapter.weights for adapter in self.adapters)])


def check_model(
    path: str | os.PathLike[str],
    *,
    implementation: Requested = "auto",
    max_model_len: int | None = None,
    revision: str | None = None,
    lora: Sequence[NamePath] = (),
    overrides: Overrides = NO_OVERRIDES,
    pickles: bool = False,
) -> CheckedModel:
    """Check a model folder (or hub id): files, headers, architecture and, for native models, every tensor.

    Adapters are checked too, for native models against the layers. `pickles`: see `check_model_folder`.

    Raises:
        ModelError: the message names the problem and the remedy.
    """
    if max_model_len is not None and max_model_len < 1:
        raise ModelError(f"--max-model-len must be at least 1, got {max_model_len}.")
    with overrides.explain_errors():
        folder = check_model_folder(path, revision, overrides, pickles=pickles)
        chosen = choose_implementation(folder.config, implementation, folder.tensors)
        if lora and is_encoder(folder.config):
            raise ModelError("--lora: an encoder takes no adapters. Merge them into the model, or leave it out.")
        adapters = read_adapters(lora)
        native = None if chosen != "native" else _check_native(folder, max_model_len)
        if native is not None:
            sites = native_sites(native[1])
            if implementation == "auto" and any(sites.cannot_replace(adapter) for adapter in adapters):
                chosen, native = "transformers", None
            else:
                adapters = fit_adapters(adapters, sites, tower_test(folder))
    return CheckedModel(folder, chosen, native, _stored_dtype(folder), max_model_len, adapters)


def _check_native(folder: ModelFolder, max_model_len: int | None) -> tuple[NativeConfig, NativeLayout]:
    config = parse_native_config(folder.config)
    layout = native_layout(config, folder)
    check_native_tensors(layout, folder)
    config.contexts.chosen(max_model_len)  # raises if it has none so long
    return config, layout


def _stored_dtype(folder: ModelFolder) -> str:
    text, outer = text_config(folder.config), folder.config
    named = next((dtype for config in (outer, text) for key in _DTYPE_KEYS if (dtype := config.get(key))), None)
    if isinstance(named, str) and (folder.quantisation is None or named.removeprefix("torch.") in _FULL_DTYPES):
        return named.removeprefix("torch.")
    sizes: Counter[str] = Counter()
    for info in folder.tensors.values():
        if isinstance(info, TensorInfo):  # a quantised tensor has no full dtype
            sizes[info.dtype] += info.nbytes
    return _STORED_DTYPES.get(sizes.most_common(1)[0][0], "float32") if sizes else "float32"
