"""Tuning of GPU kernels by chip, read from `chips.toml`: tile shapes, splits and thresholds.

A chip is named by compute capability ("sm_90"). A chip without an entry uses the default's values, which fit every chip
with 99 KiB of shared memory, or chooses better ones by measurement at start (`measured_tuning`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import torch

ATTENTION_KINDS: Final = (
    "decode", "prefill", "fixed", "float32", "latent_decode", "latent_prefill", "latent_float32"
)  # fmt: skip
PRODUCT_KINDS: Final = ("half", "float32")
LARGEST_TILE: Final = 65536


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Tile shape and launch parameters of an attention kernel.

    Raises:
        ValueError: a value that the kernels do not support; the message names it.
    """

    queries: int
    """Rows: queries times the query heads of one kv head; a power of 2, at least 16."""
    keys: int
    """Positions per step of the loop; a power of 2, at least 16. Independent of the page size."""
    warps: int
    stages: int

    def __post_init__(self) -> None:
        _check_power_of_2("queries", self.queries)
        _check_power_of_2("keys", self.keys)
        _check_launch(self.warps, self.stages)


@dataclass(frozen=True, slots=True)
class _ProductTile:
    """Tile shape and launch parameters of a matrix product.

    Raises:
        ValueError: a value that the kernels do not support; the message names it.
    """

    rows: int
    """A power of 2, at least 16."""
    columns: int
    """Output columns; a power of 2, at least 16."""
    inner: int
    """Elements of the inner dimension per step of the loop; a power of 2, at least 16."""
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "inner"):
            _check_power_of_2(name, getattr(self, name))
        _check_launch(self.warps, self.stages)


@dataclass(frozen=True, slots=True)
class GroupedTile(_ProductTile):
    """Tile of a grouped matrix product; `columns` counts outputs of each of two products, or half of one product's."""


@dataclass(frozen=True, slots=True)
class MatmulTile(_ProductTile):
    """Tile of the batch-invariant matrix product: the same for any number of tokens."""


@dataclass(frozen=True, slots=True)
class ChipTuning:
    """Tuning values of one chip.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    chip: str
    """Name of the chip, such as "sm_90", or "default"."""
    source: str
    """Origin of the values."""
    shared_bytes: int
    """Shared memory available to one block, in bytes."""
    split_keys: int
    """Least positions per work item of a decode row: long contexts are split down to this while the device is not
    full."""
    split_keys_large: int
    """Least positions per work item of a large tile (chunks and prefix groups)."""
    items_per_sm: int
    """Programs of decode rows per multiprocessor at which the device counts as full."""
    items_per_sm_large: int
    """Programs of large tiles per multiprocessor at which the device counts as full."""
    prefix_pass_tokens: int
    """Reads of cached positions, (rows - 1) x shared, that a prefix group's separate pass must save to pay off."""
    attention: Mapping[str, Mapping[int, AttentionTile]]
    """Kind (`ATTENTION_KINDS`) -> padded head size, or size of the latent -> tile."""
    grouped: Mapping[str, Mapping[int, GroupedTile]]
    """Kind ("half", "float32") -> rows -> tile."""
    matmul: Mapping[str, Mapping[int, MatmulTile]]
    """Kind ("half", "float32") -> outputs -> tile."""

    def __post_init__(self) -> None:
        for name in ("split_keys", "split_keys_large"):
            _check_power_of_2(name, getattr(self, name))
        for name in ("shared_bytes", "items_per_sm", "items_per_sm_large", "prefix_pass_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")

    def grouped_tile(self, rows: int, dtype: torch.dtype) -> GroupedTile:
        """The tile for groups of `rows` rows each on average."""
        tiles = self.grouped["float32" if dtype == torch.float32 else "half"]
        return tiles[next((size for size in sorted(tiles) if rows <= size), max(tiles))]

    def matmul_tile(self, outputs: int, dtype: torch.dtype) -> MatmulTile:
        """The tile of a product with `outputs` columns, for any number of rows."""
        tiles = self.matmul["float32" if dtype == torch.float32 else "half"]
        return tiles[next((size for size in sorted(tiles) if outputs <= size), max(tiles))]

    def attention_tile(self, kind: str, head_dim: int, dtype: torch.dtype) -> AttentionTile:
        """The tile of a kind ("decode", "prefill", ..., "latent_decode", ...) for heads of up to `head_dim` elements.

        Raises:
            ValueError: no tile supports heads of that size.
        """
        if dtype == torch.float32:
            kind = "latent_float32" if kind.startswith("latent_") else "float32"
        if kind not in self.attention:
            raise ValueError(f"no {kind.replace('_', ' ')} attention tile")
        tiles = self.attention[kind]
        for size, tile in sorted(tiles.items()):
            if head_dim <= size:
                return tile
        raise ValueError(f"no attention tile for heads of {head_dim}; the largest takes {max(tiles)}")


_FAMILIES: Final = {
    "attention": (AttentionTile, ATTENTION_KINDS),
    "grouped": (GroupedTile, PRODUCT_KINDS),
    "matmul": (MatmulTile, PRODUCT_KINDS),
}
"""Kernels with tiles -> class of these, and their kinds."""


def _check_power_of_2(name: str, value: Any) -> None:
    if type(value) is not int or not 16 <= value <= LARGEST_TILE or value & (value - 1):
        raise ValueError(f"{name} must be a power of 2 from 16 to {LARGEST_TILE}, got {value!r}")


def _check_launch(warps: Any, stages: Any) -> None:
    if warps not in (1, 2, 4, 8):
        raise ValueError(f"warps must be 1, 2, 4 or 8, got {warps!r}")
    if type(stages) is not int or not 1 <= stages <= 8:
        raise ValueError(f"stages must be from 1 to 8, got {stages!r}")


def read_table(text: str) -> dict[str, ChipTuning]:
    """The tunings of a chip table in TOML, "default" included.

    Missing values of a chip come from the default, down to the tile of a kind and head size.

    Raises:
        ValueError: an unknown key, a missing one or an unsupported value; the message names the entry.
    """
    table = tomllib.loads(text)
    if "default" not in table:
        raise ValueError("chips: no entry 'default'")
    default = table["default"]
    return {chip: _tuning(chip, default, entry) for chip, entry in table.items()}


def _tuning(chip: str, default: Mapping[str, Any], own: Mapping[str, Any]) -> ChipTuning:
    merged = {**default, **own}
    _check_keys(chip, merged, set(ChipTuning.__dataclass_fields__) - {"chip"})
    for family, (tile, kinds) in _FAMILIES.items():
        tiles, own_tiles = default.get(family, {}), own.get(family, {})
        by_kind = {kind: {**tiles.get(kind, {}), **own_tiles.get(kind, {})} for kind in (*tiles, *own_tiles)}
        _check_keys(f"{chip}.{family}", by_kind, set(kinds))
        merged[family] = {kind: _tiles(f"{chip}.{family}.{kind}", sizes, tile) for kind, sizes in by_kind.items()}
    try:
        return ChipTuning(chip=chip, **merged)
    except ValueError as error:
        raise ValueError(f"chips: {chip}: {error}") from error


def _tiles(where: str, tiles: Mapping[str, Mapping[str, Any]], cls: Any) -> dict[int, Any]:
    """Tiles by size; each size must be a power of 2, and is the number of rows of a grouped product."""
    if not tiles:
        raise ValueError(f"chips: {where}: no tile")
    made = {}
    for size, tile in tiles.items():
        entry = f"{where}.{size}"
        try:
            _check_power_of_2("size", int(size) if size.isdecimal() else size)
            rows = {"rows": int(size)} if cls is GroupedTile else {}
            _check_keys(entry, tile, set(cls.__dataclass_fields__) - rows.keys())
            made[int(size)] = cls(**rows, **tile)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith("chips:") else f"chips: {entry}: {error}") from error
    return made


def _check_keys(where: str, entry: Mapping[str, Any], fields: set[str]) -> None:
    for key in entry:
        if key not in fields:
            raise ValueError(f"chips: {where}: unknown key {key!r}; the keys are {', '.join(sorted(fields))}")
    for key in sorted(fields):
        if key not in entry:
            raise ValueError(f"chips: {where}: {key!r} is missing")


@cache
def _table() -> dict[str, ChipTuning]:
    return read_table(files("batchgen.kernels").joinpath("chips.toml").read_text("utf-8"))


def known_chips() -> list[str]:
    """Names of the chips that have an entry."""
    return sorted(name for name in _table() if name != "default")


def tuning_of(chip: str) -> ChipTuning:
    """The tuning of a chip by name ("sm_90"); the default's if it has no entry."""
    return _table().get(chip) or _table()["default"]


_compiled_for = "default"
_measured: dict[torch.device, ChipTuning] = {}


@contextmanager
def compiling_for(chip: str) -> Iterator[None]:
    """Use `chip`'s tuning for tensors on the meta device until the block ends, to compile kernels without a GPU."""
    global _compiled_for
    before, _compiled_for = _compiled_for, chip
    try:
        yield
    finally:
        _compiled_for = before


def chip_name(device: torch.device) -> str:
    """Name of the chip behind a CUDA device, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


_WITHOUT_FP8: Final = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")


def converts_fp8(device: torch.device) -> bool:
    """Whether the chip of a device, or on the meta device the one that is compiled for, has instructions for E4M3."""
    name = chip_name(device) if device.type == "cuda" else chip_tuning(device).chip
    return device.type != "cpu" and name not in _WITHOUT_FP8


def chip_tuning(device: torch.device) -> ChipTuning:
    """The tuning of the chip behind `device`; the default for other devices than GPUs.

    On the meta device: the tuning of the chip given to `compiling_for`.
    """
    if device.type == "meta":
        return tuning_of(_compiled_for)
    if device.type != "cuda":
        return tuning_of("default")
    return _measured.get(_indexed(device)) or tuning_of(chip_name(device))


def fixed_tuning(device: torch.device) -> ChipTuning:
    """`chip_tuning` without measured values: the same for every run on such a chip."""
    return tuning_of(chip_name(device)) if device.type == "cuda" else chip_tuning(device)


def _indexed(device: torch.device) -> torch.device:
    """The device with its index: "cuda" means the current one."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def candidate_tunings(shared_bytes: int) -> list[ChipTuning]:
    """Tunings that a chip without an entry may try: the default, then those that fit its shared memory."""
    others = [tuning_of(chip) for chip in known_chips()]
    return [tuning_of("default"), *(t for t in others if t.shared_bytes <= shared_bytes)]


def measured_tuning(
    device: torch.device, candidates: Sequence[ChipTuning], time: Callable[[ChipTuning], float]
) -> ChipTuning:
    """Choose a tuning for a chip without an entry by measurement, once per process; `chip_tuning` then returns it.

    Args:
        device: a CUDA device. A chip with an entry keeps it, and nothing is timed.
        candidates: tunings to choose from; the first must run on any chip.
        time: seconds of a representative step with a tuning; infinite if the chip cannot run it.
    """
    device = _indexed(device)
    if chip_name(device) in known_chips():
        return chip_tuning(device)
    if device not in _measured:
        _measured[device] = min(candidates, key=time)
    return _measured[device]
