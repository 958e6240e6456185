"""Typed access to the metadata of a GGUF file's architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from batchgen.errors import ModelError
from batchgen.gguf.header import GgufHeader
from batchgen.gguf.tensors import read_factors

MAX_LAYERS = 1 << 16
"""Most numbers that a key of an architecture lists, one for each layer."""
_SCALE: Final = (None, 0, 1)
_OFF: Final = (None, 0)
_SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.sliding_window": _OFF,
    "attention.clamp_kqv": _OFF,
    "attention.max_alibi_bias": _OFF,
    "attention.scale": _OFF,
    "attention.output_scale": _SCALE,
    "attention.value_scale": _SCALE,
    "attention.temperature_scale": _OFF,
    "attention.shared_kv_layers": _OFF,
    "attention.causal": (None, True),
    "attention.indexer.top_k": _OFF,
    "attn_logit_softcapping": _OFF,
    "router_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "logit_scale": _SCALE,
    "embedding_scale": _SCALE,
    "residual_scale": _SCALE,
    "embedding_length_per_layer_input": _OFF,
    "expert_weights_scale": _SCALE,
    "expert_group_count": _SCALE,
    "interleave_moe_layer_step": _SCALE,
    "leading_dense_block_count": _OFF,
    "expert_weights_norm": (None, True),
    "ssm.dt_b_c_rms": _OFF,
    "rope.scaling.yarn_ext_factor": (None, 1, -1),
}
"""Keys that change what a model computes, with the values that change nothing. Those of an architecture that does
not read them would be ignored."""


class Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._architecture = architecture
        self._read: set[str] = set()

    def value(self, key: str) -> Any:
        """The value of a key; None if it is absent."""
        self._read.add(key)
        value = self.header.metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, memoryview):
            if len(value) > MAX_LAYERS:
                raise ModelError(
                    f"{self.header.path}: {self._architecture}.{key} lists {len(value)} numbers. Copy the file again."
                )
            return value.tolist()
        return decimal(value) if type(value) is float else value

    def one(self, key: str) -> Any:
        """The value of a key that may list one for each layer, which must be equal."""
        value = self.value(key)
        if isinstance(value, list) and value:
            if len(set(map(str, value))) > 1:
                raise ModelError(
                    f"{self.header.path}: the layers differ in {self._architecture}.{key}, which is not supported. "
                    "Use another model."
                )
            value = value[0]
        return value

    def integer(self, key: str) -> int:
        """A positive integer."""
        value = self.one(key)
        if not _is_size(value):
            raise self.wrong(key, "a positive integer")
        return int(value)

    def layers(self, key: str, count: int) -> list[int]:
        """A positive integer for each of `count` layers, of which the file may state one for all."""
        value = self.value(key)
        numbers = value if isinstance(value, list) else [value] * count
        if len(numbers) < count or not all(map(_is_size, numbers[:count])):
            raise self.wrong(key, f"a positive integer, or {count} of them")
        return numbers[:count]

    def largest(self, key: str) -> int:
        """The largest of the numbers that a key may list for the layers: a positive integer."""
        value = self.value(key)
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in numbers) or not _is_size(max(numbers, default=0)):
            raise self.wrong(key, "a positive integer, or one for a layer")
        return int(max(numbers))

    def rows(self, tensor: str) -> int:
        """Rows of a matrix that the file must hold."""
        entry = self.header.tensors.get(tensor)
        if entry is None or len(entry.shape) != 2:
            raise ModelError(f"{self.header.path} holds no {tensor} with two axes. Copy the file again.")
        return entry.shape[0]

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.value(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        return float(value)

    def factors(self, name: str) -> list[float] | None:
        """The values of a small float32 tensor of factors for rotary frequencies; None if there is none."""
        tensors = self.header.tensors
        entry = tensors.get(f"{name}.weight") or tensors.get(f"blk.0.{name}.weight")
        if entry is None:
            return None
        values = read_factors(self.header, name, entry)
        return [decimal(value) for value in values]

    def check_all_read(self) -> None:
        """Refuse settings that were not read.

        Raises:
            ModelError: the file states one that the architecture is not known to have.
        """
        for key, neutral in _SETTINGS.items():
            if key not in self._read and (value := self.value(key)) not in neutral:
                raise ModelError(
                    f"{self.header.path} states {self._architecture}.{key} = {f'{value!r}'[:80]}, which batchgen does "
                    "not compute for this architecture. Use the checkpoint in safetensors form."
                )

    def wrong(self, key: str, wanted: str) -> ModelError:
        """The error for a value that is not what it must be."""
        shown = f"{self.value(key)!r}"[:80] if self.value(key) is not None else "nothing"
        return ModelError(
            f"{self.header.path}: {self._architecture}.{key} must be {wanted}, got {shown}. Copy the file again."
        )


Adjust = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]
"""Configuration of an architecture that follows from several keys, given what others make."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 31


def decimal(value: float) -> float:
    """The shortest decimal fraction that is `value` in float32, as it was in the checkpoint's config.json."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if math.isfinite(value) else value
