"""Loading of a model from a checked folder; problems are reported before weights are read where possible.

`batchgen.models.check.check_model` comes first, which is fast because it imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Literal

import torch

from batchgen.errors import ModelError, library_errors
from batchgen.kernels.ranks import ALONE, Ranks
from batchgen.kernels.types import E4M3
from batchgen.models.architectures import is_encoder
from batchgen.models.base import Model, ModelSpec
from batchgen.models.check import CheckedModel
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.native.config import is_headless
from batchgen.models.native.decoder import load_native, native_spec
from batchgen.models.native.ranks import rank_layout

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
KVDtypeName = Literal["auto", "fp8"]

_CACHE_DTYPES: Final[dict[str, torch.dtype | None]] = {"auto": None, "fp8": E4M3}
"""Dtype of keys and values; None: that of the run."""

_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


def load_checked(checked: CheckedModel, spec: ModelSpec) -> Model:
    """Load a checkpoint in Hugging Face format whose folder has been checked, as `spec`, by `checked_spec`, says.

    Raises:
        ModelError: the message names the reason and the remedy; raised before weights are read where possible.
    """
    if checked.native is not None:
        return load_native(spec, *checked.native, checked.folder, checked.adapters)
    with _named_failures(checked.folder, "load"):
        # Imported here because the library is slow to import and native models do not need it.
        from batchgen.models.library.load import load_transformers
        from batchgen.models.library.text import read_transformers_config

        library_config, _ = read_transformers_config(checked.folder, checked.max_model_len)
        if is_encoder(checked.folder.config):
            from batchgen.models.embed.encoder import load_encoder

            return load_encoder(library_config, spec, checked.folder)
        return load_transformers(library_config, spec, checked.folder, checked.adapters)


def of_rank(checked: CheckedModel, ranks: Ranks) -> CheckedModel:
    """The part of a native model that a rank holds; the layout of others is known once the library has built them.

    Raises:
        UsageError: the model cannot be split among so many ranks.
    """
    return checked if checked.native is None else replace(checked, native=rank_layout(*checked.native, ranks))


def checked_spec(
    checked: CheckedModel,
    *,
    dtype: DtypeName = "auto",
    device: DeviceName = "auto",
    elsewhere: bool = False,
    kv_dtype: KVDtypeName = "auto",
    ranks: Ranks = ALONE,
) -> ModelSpec:
    """Spec of a model whose folder has been checked, without reading weights.

    Args:
        checked: the model folder, its implementation, context length and adapters.
        dtype: `auto` is the checkpoint's dtype on a GPU. On a CPU it is bfloat16 if the checkpoint is bfloat16 or
            float16 and the processor multiplies bfloat16 (AVX512-BF16 or AMX), else float32.
        device: `auto` is the GPU if there is one.
        elsewhere: whether the device need not exist on this machine.
        kv_dtype: of keys and values.
        ranks: of those that compute the model together; the model is that of one rank (`of_rank`).

    Raises:
        ModelError: the message names the reason and the remedy.
    """
    where = torch.device(device) if elsewhere and device != "auto" else _device(device)
    kind = _dtype(checked, dtype, where)
    if checked.native is not None:
        config, layout = checked.native
        context = config.contexts.chosen(checked.max_model_len)
        spec = native_spec(config, layout, kind, where, context, checked.adapters, ranks)
        generates = not is_headless(checked.folder.config)
        return replace(spec, cache_dtype=_CACHE_DTYPES[kv_dtype], generates=generates)
    with _named_failures(checked.folder, "build"):
        from batchgen.models.library.load import transformers_spec  # as in load_checked
        from batchgen.models.library.text import read_transformers_config

        library_config, context = read_transformers_config(checked.folder, checked.max_model_len)
        if is_encoder(checked.folder.config):
            from batchgen.models.embed.encoder import encoder_spec  # as in load_checked

            if ranks.count > 1:
                raise ModelError(f"An embedding model is not split: {checked.folder.path}. Use --tensor-parallel 1.")
            return encoder_spec(library_config, kind, where, context)
        spec = transformers_spec(library_config, checked.folder, kind, where, context, checked.adapters, ranks)
        return replace(spec, cache_dtype=_CACHE_DTYPES[kv_dtype])


@contextmanager
def _named_failures(folder: ModelFolder, action: str) -> Iterator[None]:
    """Turn what a call into the library raises into an error that names the model."""
    what = f"transformers cannot {action} this {folder.model_type} model"
    remedy = f"Check {folder.path / 'config.json'} against the weights, or use another model."
    with library_errors(what, remedy), folder.overrides.explain_errors():
        yield


def _device(name: DeviceName) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("There is no CUDA device that this torch can use. Use --device cpu, or install a CUDA build.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(checked: CheckedModel, name: DtypeName, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    stored = _DTYPES.get(checked.stored_dtype, torch.float32)
    if device.type != "cpu" or stored == torch.float32:
        return stored
    has = torch.cpu.get_capabilities()  # instructions for products of bfloat16
    return torch.bfloat16 if any(map(has.get, ("avx512_bf16", "amx_bf16", "amx_tile"))) else torch.float32
