"""The chip table: its contents, its errors, and the choice of a chip without an entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files

import pytest
import torch

from batchgen.engine.backend_choice import group_min_saving
from batchgen.kernels import chips
from batchgen.kernels.chips import (
    candidate_tunings,
    chip_tuning,
    compiling_for,
    known_chips,
    read_table,
    tuning_of,
)
from batchgen.plan.config import GROUP_MIN_SAVING

TABLE = files("batchgen.kernels").joinpath("chips.toml").read_text("utf-8")
META = torch.device("meta")


@pytest.mark.parametrize("chip", ["default", *known_chips()])
def test_every_chip_has_tiles_for_every_head_size_and_dtype(chip: str) -> None:
    tuning = tuning_of(chip)
    assert tuning.chip == chip
    assert tuning.source
    assert tuning.shared_bytes >= tuning_of("default").shared_bytes, "the default fits every chip"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for kind in ("decode", "prefill"):
            for head_dim in (16, 64, 80, 96, 128, 192, 256):
                tile = tuning.attention_tile(kind, head_dim, dtype)
                assert tile.queries >= 16
            with pytest.raises(ValueError, match="no attention tile for heads of 257; the largest takes 256"):
                tuning.attention_tile(kind, 257, dtype)
        for kind in ("latent_decode", "latent_prefill"):
            assert all(tuning.attention_tile(kind, latent, dtype).queries >= 16 for latent in (16, 256, 512))
        for rows in (1, 16, 17, 64, 10_000):
            tile = tuning.grouped_tile(rows, dtype)
            assert tile.rows >= min(rows, 64)
        for outputs in (1, 1024, 2049, 200_000):
            assert tuning.matmul_tile(outputs, dtype).rows >= 64


def test_missing_values_of_a_chip_are_the_default_s() -> None:
    table = read_table(
        TABLE + '\n[sm_123]\nsource = "a test"\nsplit_keys = 4096\n'
        "[sm_123.attention.decode]\n128 = {queries = 32, keys = 16, warps = 1, stages = 4}\n"
    )
    own, default = table["sm_123"], table["default"]
    assert own.split_keys == 4096
    assert own.prefix_pass_tokens == default.prefix_pass_tokens
    assert own.attention["decode"][128].keys == 16
    assert own.attention["decode"][64] == default.attention["decode"][64]
    assert own.attention["prefill"] == default.attention["prefill"]
    assert own.grouped == default.grouped
    assert own.matmul == default.matmul


ATTENTION = "[sm_123.attention.decode]\n128 = { queries = 16, keys = 64, warps = 4, stages = 2 }\n"
MATMUL = "[sm_123.matmul.half]\n2048 = { rows = 64, columns = 64, inner = 64, warps = 4, stages = 2 }\n"
GROUPED = "[sm_123.grouped.half]\n16 = { columns = 64, inner = 64, warps = 4, stages = 2 }\n"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("[sm_123]\nsplit = 1\n", "chips: sm_123: unknown key 'split'; the keys are attention, grouped, items_per_sm"),
        ("[sm_123]\nsplit_keys = 100\n", "chips: sm_123: split_keys must be a power of 2 from 16 to 65536, got 100"),
        ("[sm_123]\nsplit_keys = 8\n", "chips: sm_123: split_keys must be a power of 2 from 16 to 65536, got 8"),
        ("[sm_123]\nitems_per_sm = 0\n", "chips: sm_123: items_per_sm must be an integer of at least 1, got 0"),
        ("[sm_123.attention.prefil]\n", "chips: sm_123.attention: unknown key 'prefil'"),
        ("[sm_123.matmul.double]\n", "chips: sm_123.matmul: unknown key 'double'"),
        (MATMUL.replace("rows = 64", "rows = 65"), "chips: sm_123.matmul.half.2048: rows must be a power of 2"),
        (ATTENTION.replace("128", "x"), "chips: sm_123.attention.decode.x: size must be a power of 2"),
        (ATTENTION.replace("= 16", "= true"), "chips: sm_123.attention.decode.128: queries must be a power of 2 from"),
        (ATTENTION.replace("stages = 2", "stages = 9"), "chips: sm_123.attention.decode.128: stages must be from 1 to"),
        (ATTENTION.replace(", stages = 2", ""), "chips: sm_123.attention.decode.128: 'stages' is missing"),
        (GROUPED.replace("16 =", "24 ="), "chips: sm_123.grouped.half.24: size must be a power of 2"),
        (GROUPED.replace("warps = 4", "warps = 16"), "chips: sm_123.grouped.half.16: warps must be 1, 2, 4 or 8, got"),
    ],
)
def test_a_wrong_table_is_refused_and_names_the_entry(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_table(TABLE + "\n" + entry)


def test_a_table_needs_a_default_with_all_keys() -> None:
    with pytest.raises(ValueError, match="chips: no entry 'default'"):
        read_table("[sm_90]\nsource = 'x'\n")
    with pytest.raises(ValueError, match="chips: default: 'shared_bytes' is missing"):
        read_table(re.sub(r"(?m)^shared_bytes.*$", "", TABLE))


def test_meta_tensors_use_the_chip_compiled_for() -> None:
    names = {chip: chip for chip in known_chips()} | {"sm_75": "default"}
    for chip, name in names.items():
        with compiling_for(chip):
            assert chip_tuning(META).chip == name
            assert chip_tuning(torch.device("cpu")).chip == "default"
    assert chip_tuning(META).chip == "default"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], torch.device]:
    """A CUDA device of a given capability, as far as the table queries it."""

    def make(major: int, minor: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(chips, "_measured", {})
        return torch.device("cuda")

    return make


def test_a_known_chip_uses_its_entry(device: Callable[[int, int], torch.device]) -> None:
    for chip in known_chips():
        assert chip_tuning(device(int(chip[3:-1]), int(chip[-1]))) is tuning_of(chip)


def test_candidates_fit_the_shared_memory() -> None:
    for size in (1, tuning_of("default").shared_bytes, 1 << 20):
        first, *others = candidate_tunings(size)
        assert first.chip == "default"
        assert [t.chip for t in others] == [c for c in known_chips() if tuning_of(c).shared_bytes <= size]


def test_the_engine_groups_by_the_chip_on_a_gpu_only(device: Callable[[int, int], torch.device]) -> None:
    assert group_min_saving(torch.device("cpu")) == GROUP_MIN_SAVING
    assert group_min_saving(device(9, 0)) == tuning_of("sm_90").prefix_pass_tokens
