"""Random LoRA adapters for a model, stored in the user's cache folder, and the model with one of them merged."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.bench.engines.peer_tools import build_folder
from batchgen.bench.shapes import bench_cache
from batchgen.bench.workloads import AdapterSet
from batchgen.errors import OutputError, UsageError
from batchgen.models.folder import check_model_folder

__all__ = ["adapter_folders", "adapter_parameters", "build_adapter", "merge_adapter"]

_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_RECIPE_VERSION: Final = 1
"""Version of how adapters are generated; part of the cache key."""
_B_SCALE: Final = 0.05
"""Standard deviation of B: changes each projection by a few per cent, so that outputs differ with the adapter."""


def adapter_folders(model: str, adapters: AdapterSet) -> list[tuple[str, str]]:
    """(name, folder) of each adapter; builds the ones that the cache folder lacks.

    Raises:
        UsageError: the model has none of the adapted linear layers.
        OutputError: the cache folder is not writable.
    """
    sizes = _linear_sizes(model)
    recipe = json.dumps([_RECIPE_VERSION, adapters.rank, sorted(sizes.items())])
    root = bench_cache() / f"lora-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    found = []
    for number in range(adapters.count):
        folder = root / str(number)
        try:
            build_folder(folder, partial(build_adapter, sizes, adapters.rank, number))
        except OSError as error:
            raise OutputError(f"cannot write the adapter {folder}: {error.strerror or error}") from None
        found.append((adapters.name(number), str(folder)))
    return found


def adapter_parameters(model: str, rank: int) -> int:
    """Number of parameters of one adapter: r (I + O) for every adapted layer [O, I]."""
    return sum(rank * (outer + inner) for outer, inner in _linear_sizes(model).values())


def build_adapter(sizes: Mapping[str, tuple[int, int]], rank: int, seed: int, folder: Path) -> None:
    """Write an adapter folder in peft's layout: float32 A [r, I] and B [O, r] for every module [O, I], scale 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outer, inner) in sizes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) * inner**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) * _B_SCALE
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in sizes}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge_adapter(model: str, adapter: str, folder: Path) -> None:
    """Write the model with every adapted W replaced by W + B A, in float32: the reference for rows of the adapter.

    Args:
        model: folder of the checkpoint.
        adapter: folder written by `build_adapter`.
        folder: empty folder to write to.
    """
    checkpoint = check_model_folder(model)
    changes = load_file(Path(adapter) / "adapter_model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        for name, stored in load_file(file).items():
            change = f"base_model.model.{name.removesuffix('.weight')}"
            down = changes.get(f"{change}.lora_A.weight")
            wide = stored.float()
            tensors[name] = wide if down is None else wide + changes[f"{change}.lora_B.weight"] @ down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in checkpoint.path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def _linear_sizes(model: str) -> dict[str, tuple[int, int]]:
    """Module name -> (O, I) of the adapted layers."""
    found: dict[str, tuple[int, int]] = {}
    for name, info in check_model_folder(model).tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in _MODULES and len(info.shape) == 2:
            found[module] = (info.shape[0], info.shape[1])
    if not found:
        raise UsageError(f"workloads with adapters need a model with {', '.join(_MODULES)}; {model} has none of them")
    return dict(sorted(found.items()))
