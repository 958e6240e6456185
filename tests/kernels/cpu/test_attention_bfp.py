"""Precision of compiled bfloat16 attention, in block floating point and with the dot instruction: errors in addition to
the rounding of the result, where numbers that share a scale differ most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.attention import work_items as chunk_prefixes
from batchgen.kernels.cpu import attention_list
from batchgen.kernels.cpu.attention import CompiledAttention
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import methods
from batchgen.kernels.types import AttentionArgs
from tests.cases import examples
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, StepBuilder, any_step

pytestmark = pytest.mark.skipif(not loaded(), reason="no C++ compiler here")

BF16 = torch.bfloat16
LOSS = {False: 2.0**-11, True: 2.0**-9}
"""Allowed error by `dots`, relative to the largest value: a quarter of bfloat16's rounding for block floating point;
the whole of it for dots, whose weights are rounded to bfloat16."""


@pytest.fixture(params=[False, True], ids=["bfp", "dots"])
def dots(request: pytest.FixtureRequest) -> bool:
    """Whether to use the dot instruction, if the processor has it."""
    if request.param and "dot" not in methods(BF16):
        pytest.skip("this processor has no dot instruction for bfloat16")
    return bool(request.param)


def largest_values(step: Step) -> torch.Tensor:
    """[H, Dv]: the largest magnitude in each column of the values."""
    largest = step.filled()[1].double().nan_to_num().abs().flatten(0, 1).amax(0)  # [K, Dv]
    return largest.repeat_interleave(step.query.shape[1] // largest.shape[0], 0)


def assert_near(step: Step, dots: bool, loss: float | None = None, **options: Any) -> None:
    """Compare with the reference: the result's rounding, plus `loss` times the largest value of a column."""
    keys, values = step.filled()
    scale = float(step.key.shape[2] ** -0.5)
    exact = attend_by_token(step.batch, step.query, keys, values, AttentionArgs(scale, **options))
    made = CompiledAttention(step.pool, step.batch, 2, dots=dots)
    got = made.attend(0, step.query, step.key, step.value, AttentionArgs(scale, **options))
    assert got.dtype == BF16
    largest = largest_values(step)
    loss = LOSS[dots] if loss is None else loss
    off = (got.double() - exact).abs() - 2.0**-8 * exact.abs()
    assert bool((off <= loss * largest + 1e-37).all()), f"by {(off / largest).nan_to_num().max():.2g} of the largest"


def rounding_loss_of_keys(step: Step) -> float:
    """Error of results due to rounding such keys to bfloat16 at all, relative to the largest value."""
    keys, values = step.filled()
    scale = float(step.key.shape[2] ** -0.5)
    before = keys.double() * (1 + (torch.rand(keys.shape, dtype=torch.float64) * 2 - 1) * 2.0**-9)
    made = [attend_by_token(step.batch, step.query, k, values, AttentionArgs(scale)) for k in (before, keys)]
    return float(((made[0] - made[1]).abs() / largest_values(step)).max())


def long_prompt(shape: Shape, past: int = 700) -> Step:
    b = StepBuilder(shape)
    b.chunk(37, past=past)
    b.chunk(5)
    return b.build()


def unchanged(step: Step) -> None:
    """Random numbers as they are."""


def first_outweighs(step: Step) -> None:
    """The first position has half of the weight or more, and hundreds share the rest."""
    keys, first = step.pool.keys[0], step.batch.chunks[0].pages[0]
    keys.mul_(0.05)
    step.key.mul_(0.05)
    keys[first, 0] = 3.0
    step.query.abs_().mul_(0.3)


def large_channel(step: Step) -> None:
    """One channel of all keys and queries is many times larger than the others."""
    step.pool.keys[0][..., 3] *= 30
    step.key[..., 3] *= 30
    step.query[..., 3] *= 0.1


def uneven_values(step: Step) -> None:
    """Columns of values of very different magnitudes, one of them zero."""
    size = step.value.shape[-1]
    factors = 10.0 ** torch.linspace(-6, 6, size).to(BF16)
    factors[size // 2] = 0
    for values in (step.pool.values[0], step.value):
        values.mul_(factors)


def tiny_values(step: Step) -> None:
    """Values too small for a scale, which may become zeros."""
    step.pool.values[0].mul_(1e-39)
    step.value.mul_(1e-39)


DIMS = [(64, 64), (128, 128), (96, 24), (160, 40), (33, 7), (272, 16)]


@pytest.mark.parametrize(
    ("change", "key_dim", "value_dim"),
    [
        *((unchanged, *dims) for dims in DIMS),
        (first_outweighs, 64, 64),
        (first_outweighs, 160, 40),
        (uneven_values, 128, 128),
        (uneven_values, 33, 7),
        (tiny_values, 64, 64),
        (tiny_values, 272, 16),
    ],
)
def test_the_error_is_small(change: Callable[[Step], None], key_dim: int, value_dim: int, dots: bool) -> None:
    step = long_prompt(Shape(6, 2, key_dim, value_dim, dtype=BF16))
    change(step)
    assert_near(step, dots)


@pytest.mark.parametrize(("key_dim", "value_dim"), DIMS[::2])
def test_a_large_channel_loses_less_than_rounding_to_bfloat16(key_dim: int, value_dim: int, dots: bool) -> None:
    """Numbers that share its scale lose precision, but their products are small in comparison."""
    torch.manual_seed(0)
    step = long_prompt(Shape(6, 2, key_dim, value_dim, dtype=BF16))
    large_channel(step)
    assert_near(step, dots, rounding_loss_of_keys(step))


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"softcap": 3.0}, {"window": 70, "softcap": 2.0, "sinks": torch.ones(6)}],
)
def test_windows_and_caps(options: dict[str, Any], dots: bool) -> None:
    assert_near(long_prompt(Shape(6, 2, 64, 64, dtype=BF16)), dots, **options)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60), st.integers(0, 3)), max_size=5),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from([(4, 2), (3, 1), (14, 2), (9, 3)]),
    st.sampled_from([(16, 16), (64, 64), (40, 24), (7, 33)]),
    st.sampled_from([None, 7, 30]),
    st.sampled_from([1, 12, 16]),
    st.integers(0, 1 << 20),
)
def test_any_step(
    dots: bool,
    chunks: list[tuple[int, int, int]],
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    page_size: int,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_prefixes, "LEAST_KEYS", 2 * page_size)
        patch.setattr(attention_list, "_ROWS", 24)
        patch.setattr(attention_list, "_LEAST_KEYS", 16)
        patch.setattr(attention_list, "_STEP", 8)
        assert_near(any_step(chunks, rows, Shape(*heads, *dims, page_size, BF16), seed), dots, window=window)


@pytest.mark.parametrize(
    ("of", "poison"), [("query", torch.nan), ("query", torch.inf), ("key", torch.inf), ("value", torch.nan)]
)
def test_nan_and_infinity_do_not_spread_to_other_rows(of: str, poison: float, dots: bool) -> None:
    b = StepBuilder(Shape(8, 2, dtype=BF16))
    rows = [b.decode(n, own_start=32) for n in (9, 30, 12, 40, 3)]
    b.group(rows, 0, 2)
    step = b.build()

    def attend() -> torch.Tensor:
        made = CompiledAttention(step.pool, step.batch, 2, dots=dots)
        return made.attend(0, step.query, step.key, step.value, AttentionArgs(0.25))

    clean = attend()
    getattr(step, of)[1] = poison
    got = attend()
    assert not got[1].isfinite().any()
    others = [0, 2, 3, 4]
    assert torch.equal(got[others], clean[others])
