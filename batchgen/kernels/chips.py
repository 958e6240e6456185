"""What each chip does best, read from `chips.toml`: tile shapes, splits and thresholds. Data, not code."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

__all__ = ["AttentionTile", "ChipTuning", "GroupedTile", "chip_tuning", "known_chips", "tuning_of"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Shape of an attention kernel's tile and how it is launched."""

    queries: int
    """Rows: queries times the heads that share a key head; a power of 2, at least 16."""
    keys: int
    """Positions per step of the loop; a power of 2, at least 16. Independent of the page size."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Shape of a tile of a matrix product by groups of rows, and how it is launched."""

    rows: int
    """Rows of one group; a power of 2, at least 16."""
    columns: int
    """Outputs of each of two products, or half of those of one; a power of 2, at least 16."""
    inner: int
    """Numbers per step of the loop; a power of 2, at least 16."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ChipTuning:
    """Everything chosen by chip."""

    chip: str
    """"sm_90" and the like, or "default"."""
    source: str
    """Where the numbers come from."""
    split_keys: int
    """Least positions of a decode row per work item: long contexts are split so far where the device is not full."""
    split_keys_large: int
    """Least positions per work item of a tile of many rows, chunks and prefix groups."""
    items_per_sm: int
    """Programs of decode rows per multiprocessor from which on the device counts as full."""
    items_per_sm_large: int
    """Programs of tiles of many rows per multiprocessor, likewise."""
    prefix_pass_tokens: int
    """Rows times shared positions from which a pass of its own pays for a group."""
    attention: Mapping[str, Mapping[int, AttentionTile]]
    """"decode", "prefill" and "float32" -> padded head size -> tile."""
    grouped: Mapping[str, Mapping[int, GroupedTile]]
    """"half" and "float32" -> rows -> tile."""

    def grouped_tile(self, rows: int, dtype: torch.dtype) -> GroupedTile:
        """The tile for groups that have `rows` rows each on average."""
        tiles = self.grouped["float32" if dtype == torch.float32 else "half"]
        return tiles[next((size for size in sorted(tiles) if rows <= size), max(tiles))]

    def attention_tile(self, kind: str, head_dim: int, dtype: torch.dtype) -> AttentionTile:
        """The tile of a kind, "decode" or "prefill", for heads of up to `head_dim` numbers.

        Raises:
            ValueError: no tile takes heads of that size.
        """
        tiles = self.attention["float32" if dtype == torch.float32 else kind]
        for size, tile in sorted(tiles.items()):
            if head_dim <= size:
                return tile
        raise ValueError(f"no attention tile for heads of {head_dim}; the largest takes {max(tiles)}")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("batchgen.kernels").joinpath("chips.toml").read_text("utf-8"))


def known_chips() -> list[str]:
    """The chips with entries of their own."""
    return sorted(name for name in _table() if name != "default")


@cache
def tuning_of(chip: str) -> ChipTuning:
    """The tuning of a chip by name ("sm_90"); what it does not say, or all of it, is the default's."""
    default = _table()["default"]
    own = _table().get(chip, {})
    merged = default | own
    kinds = default["attention"] | own.get("attention", {})
    tiles = {
        kind: {int(size): AttentionTile(**tile) for size, tile in by_size.items()} for kind, by_size in kinds.items()
    }
    grouped = default["grouped"] | own.get("grouped", {})
    return ChipTuning(
        chip=chip if own else "default",
        source=merged["source"],
        split_keys=merged["split_keys"],
        split_keys_large=merged["split_keys_large"],
        items_per_sm=merged["items_per_sm"],
        items_per_sm_large=merged["items_per_sm_large"],
        prefix_pass_tokens=merged["prefix_pass_tokens"],
        attention=tiles,
        grouped={
            kind: {int(rows): GroupedTile(int(rows), **tile) for rows, tile in by_rows.items()}
            for kind, by_rows in grouped.items()
        },
    )


def chip_tuning(device: torch.device) -> ChipTuning:
    """The tuning of the chip behind `device`; the default anywhere but on a GPU."""
    if device.type != "cuda":
        return tuning_of("default")
    major, minor = torch.cuda.get_device_capability(device)
    return tuning_of(f"sm_{major}{minor}")
