"""Compiled operations on rows of logits, where `test_ops.py` does not test them: rows of all kinds, columns in other
layouts, and the report of rows that cannot be sampled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.kernels import noise
from batchgen.kernels.cpu import ops
from batchgen.kernels.cpu.library import loaded, missing
from batchgen.kernels.cpu.ops import COMPILED_OPS
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.sampling import SamplingColumns
from tests.kernels.logit_rows import KINDS, logits_of
from tests.kernels.references import sample_reference

pytestmark = pytest.mark.skipif(not loaded(), reason=str(missing()))

GRID = list(
    itertools.product(
        [0.0, 1e-5, 0.3, 1.0, 4.0], [-1, 1, 2, 7, 33, 500, 1 << 30], [1.0, 0.95, 0.5, 1e-9], [0.0, 0.1, 1.0]
    )
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share any amount of work."""
    torch.set_num_threads(2)
    monkeypatch.setattr(ops, "_SERIAL", 0)


def keys_for(rows: int) -> Tensor:
    return noise.row_keys(torch.full((rows,), 3), torch.zeros(rows, dtype=torch.int64), torch.arange(rows))


@dtypes
@pytest.mark.parametrize(
    ("kind", "vocab"), [*itertools.product(KINDS, (63, 8192)), ("normal", 15), ("ties", 16), ("normal", 257)]
)
def test_every_kind_of_row_equals_the_reference(kind: str, vocab: int, dtype: torch.dtype) -> None:
    params = GRID[::11]
    logits, keys = logits_of(kind, len(params), vocab).to(dtype), keys_for(len(params))
    before = logits.clone()
    found = COMPILED_OPS.sample(logits, SamplingColumns.of(*zip(*params, strict=True)).with_keys(keys))  # type: ignore[arg-type]
    assert torch.equal(logits, before)
    expected = [sample_reference(logits[i].float().numpy(), *p, int(keys[i])) for i, p in enumerate(params)]
    assert found.tokens.tolist() == expected
    assert found.bad is not None
    assert not found.bad.any()


def test_columns_and_keys_may_be_broadcast() -> None:
    """A kernel must not read beyond the single number of an expanded tensor."""
    logits = logits_of("normal", 40, 300)
    wide = [torch.tensor(value).expand(40).numpy() for value in (0.7, 5, 0.9, 0.01)]
    keys = torch.tensor(7).expand(40)
    same = SamplingColumns.of(*(column.copy() for column in wide)).with_keys(keys.clone())
    assert torch.equal(
        COMPILED_OPS.sample(logits, SamplingColumns.of(*wide).with_keys(keys)).tokens,
        COMPILED_OPS.sample(logits, same).tokens,
    )


def test_greedy_rows_need_no_keys() -> None:
    logits = logits_of("ties", 9, 300)
    columns = SamplingColumns.of([0.0] * 9, [0] * 9, [1.0] * 9, [0.0] * 9)
    assert torch.equal(COMPILED_OPS.sample(logits, columns).tokens, logits.argmax(-1))


@dtypes
@pytest.mark.parametrize("place", [0, 5, 299, 304])
def test_rows_that_cannot_be_sampled_are_reported(place: int, dtype: torch.dtype) -> None:
    logits = logits_of("normal", 8, 305).to(dtype)
    logits[1, place] = torch.nan
    logits[2, place] = torch.inf
    logits[3] = -torch.inf
    logits[4, place] = -torch.inf
    logits[5, place] = -torch.nan
    logits[6], logits[6, place] = -torch.inf, torch.nan
    expected = torch.tensor([False, True, True, True, False, True, True, False])
    ids, largest, normalizers, bad = COMPILED_OPS.argmax_lse(logits)
    plain = TORCH_OPS.argmax_lse(logits)
    assert torch.equal(bad, expected)
    assert torch.equal(COMPILED_OPS.nan_rows(logits), expected)
    assert ((ids >= 0) & (ids < 305)).all()
    torch.testing.assert_close(largest, plain[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normalizers, plain[2], rtol=1e-6, atol=2e-6, equal_nan=True)
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 4)):
        columns = SamplingColumns.of([temperature] * 8, [top_k] * 8, [0.9] * 8, [0.0] * 8).with_keys(keys_for(8))
        found = COMPILED_OPS.sample(logits, columns)
        assert found.bad is not None
        assert torch.equal(found.bad, expected)
        assert ((found.tokens >= 0) & (found.tokens < 305)).all()
    ids, _ = COMPILED_OPS.top_logprobs(logits, 5)
    assert ((ids >= 0) & (ids < 305)).all()


def test_strided_rows_and_numbers() -> None:
    logits = logits_of("normal", 6, 300)
    wide = torch.cat((logits, torch.full((6, 20), 50.0)), 1)[:, :300]
    assert torch.equal(COMPILED_OPS.log_normalizers(wide), COMPILED_OPS.log_normalizers(logits))
    assert torch.equal(COMPILED_OPS.top_logprobs(wide, 7)[0], TORCH_OPS.top_logprobs(logits, 7)[0])
    torch.testing.assert_close(COMPILED_OPS.log_normalizers(logits.t()), torch.logsumexp(logits.t(), -1))
    assert COMPILED_OPS.nan_rows(logits[:0]).shape == (0,)
    given = [torch.from_numpy(np.random.default_rng(i).integers(-(2**63), 2**63, 200))[::2] for i in range(3)]
    assert torch.equal(COMPILED_OPS.row_keys(*given), noise.row_keys(*given))
