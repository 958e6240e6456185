"""Top-k of rows in Triton's interpreter, against PyTorch: exactly equal, with any ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import top as pytorch
from batchgen.kernels.gpu import row_scan
from batchgen.kernels.gpu import top as gpu
from tests.kernels.closeness import DTYPES
from tests.kernels.logit_rows import drawn, strided, tied

torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use sizes at which a few hundred logits take every path."""
    monkeypatch.setattr(gpu, "GROUPS", {4: 8, 16: 4})
    monkeypatch.setattr(gpu, "_STEP", 16)
    monkeypatch.setattr(row_scan, "BLOCK", 64)


def check(logits: Tensor, k: int) -> None:
    before = logits.clone()
    values, ids = gpu.largest(logits, k)
    expected_values, expected_ids = pytorch.largest(logits, k)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert (values.dtype, ids.dtype) == (logits.dtype, torch.int64)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(3, 1, 1), (2, 7, 7), (1, 63, 3), (2, 100, 16), (1, 333, 9)])
def test_equals_pytorch(rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    check(drawn(rows, vocab, dtype), k)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("vocab", "k"), [(5, 2), (64, 16), (100, 4), (257, 5), (300, 16)])
def test_ties_go_by_the_lowest_id(vocab: int, k: int) -> None:
    check(tied(2, vocab, seed=k), k)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["padded", "transposed", "every second"])
@pytest.mark.parametrize(("vocab", "k"), [(12, 3), (201, 6)])
def test_any_strides(vocab: int, k: int, kind: str) -> None:
    check(strided(drawn(3, vocab), kind), k)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [0.0, -torch.inf, 3e38])
def test_rows_of_one_value_give_the_first_ids(value: float) -> None:
    check(torch.full((1, 150), value), 10)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("order", [1, -1])
def test_sorted_rows(order: int) -> None:
    check((order * torch.arange(200.0))[None], 13)


@pytest.mark.usefixtures("small")
def test_no_rows() -> None:
    values, ids = gpu.largest(torch.empty(0, 100), 5)
    assert values.shape == ids.shape == (0, 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [9, 130])
def test_rows_with_a_nan_yield_ids_in_range_and_do_not_affect_others(vocab: int, what: float) -> None:
    logits = drawn(3, vocab)
    logits[1, [2, vocab - 1]] = what
    values, ids = gpu.largest(logits, 7)
    assert bool(((ids[1] >= 0) & (ids[1] < vocab)).all())
    assert len(set(ids[1].tolist())) == 7
    expected_values, expected_ids = pytorch.largest(logits[[0, 2]], 7)
    assert torch.equal(ids[[0, 2]], expected_ids)
    assert torch.equal(values[[0, 2]], expected_values)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("vocab", [40, 400])
def test_unsupported_sizes_use_pytorch(vocab: int) -> None:
    check(drawn(2, vocab), 17)


@pytest.mark.usefixtures("small")
def test_float64_uses_pytorch() -> None:
    check(drawn(2, 90).double() + 1e-12 * torch.arange(90), 4)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_row(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "GROUPS", data.draw(st.sampled_from([{4: 8, 16: 4}, {16: 2}])))
        patch.setattr(gpu, "_STEP", data.draw(st.sampled_from([8, 64])))
        patch.setattr(row_scan, "BLOCK", data.draw(st.sampled_from([16, 128])))
        some = st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 1e-40, 1.0, 3e38])
        row = data.draw(st.lists(some | st.floats(-9, 9, width=32), min_size=1, max_size=150))
        check(torch.tensor([row]), data.draw(st.integers(1, min(16, len(row)))))


@pytest.mark.parametrize(("vocab", "k"), [(5000, 1), (5000, 20), (9000, 100), (20_000, 1000)])
def test_sizes_as_shipped(vocab: int, k: int) -> None:
    check(drawn(1, vocab, torch.bfloat16), k)
    check(tied(1, vocab), k)


@pytest.mark.parametrize("k", [1, 8, 9, 32, 100, 129, 1024])
def test_groups_are_used_only_if_they_save_work(k: int) -> None:
    for vocab in (1024, 4096, 8192, 16_384, 151_936, 262_144, 500_000):
        assert gpu.serves(vocab, k)
        group = gpu.group_size(vocab, k)
        assert not group or -(-vocab // group) > k
    assert gpu.group_size(151_936, k)
    assert not gpu.serves(1 << 22, k)
    assert not gpu.serves(151_936, 1025)


@pytest.mark.usefixtures("small")
def test_rows_too_long_for_registers_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_GROUPS", 8)
    check(drawn(1, 200), 3)
