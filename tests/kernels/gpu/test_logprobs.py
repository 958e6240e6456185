"""Kernels that read logits in Triton's interpreter, against PyTorch and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.kernels import logprobs as pytorch
from batchgen.kernels.gpu import logprobs as gpu
from batchgen.kernels.gpu import row_scan, top
from batchgen.kernels.gpu.launch import recording
from batchgen.kernels.sampling import greedy, nan_rows
from tests.kernels.closeness import DTYPES
from tests.kernels.logit_rows import drawn, strided, tied

torch.set_num_threads(1)

SHAPES = [(1, 1), (3, 2), (2, 63), (5, 100), (1, 1000)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks per row, and few groups."""
    monkeypatch.setattr(row_scan, "BLOCK", 64)
    monkeypatch.setattr(top, "GROUPS", {4: 8, 16: 4})


def close(got: Tensor, exact: Tensor) -> None:
    """Compare up to a few float32 roundings of a logit; the logits are not rounded."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=3e-7, atol=3e-6)


def tokens_of(logits: Tensor, seed: int = 0) -> Tensor:
    return torch.randint(0, logits.shape[1], (len(logits),), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_argmax_with_its_lse(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = drawn(rows, vocab, dtype)
    ids, largest, lse, bad = gpu.argmax_lse(logits)
    assert torch.equal(ids, greedy(logits))
    assert torch.equal(largest, logits.amax(-1).float())
    assert bad.dtype == torch.bool
    assert not bad.any()
    close(lse, logits.double().logsumexp(-1))


@pytest.mark.parametrize("vocab", [2, 64, 65, 300])
def test_argmax_is_the_first_of_equal_logits(vocab: int) -> None:
    logits = tied(6, vocab, torch.float16)
    logits[0] = 0.25
    logits[1] = -0.0
    ids, largest, _, _ = gpu.argmax_lse(logits)
    assert torch.equal(ids, greedy(logits))
    assert torch.equal(largest, logits.amax(-1).float())


# The interpreter's numpy warns about intended operations: exp of a row with an infinity, log of no mass.
@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("vocab", [4, 100, 200])
@pytest.mark.parametrize("others", [1.0, -torch.inf, 1000.0])
def test_rows_that_cannot_be_sampled(vocab: int, others: float) -> None:
    logits = torch.full((7, vocab), others)
    logits[1, -1] = torch.nan
    logits[2, 0], logits[2, 3] = torch.inf, torch.nan
    logits[3, 2] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1] = -torch.nan
    ids, largest, lse, bad = gpu.argmax_lse(logits)
    _, expected_largest, expected_lse, expected_bad = pytorch.argmax_lse(logits)
    assert torch.equal(bad, expected_bad)
    assert torch.equal(bad, nan_rows(logits))
    assert bool(((ids >= 0) & (ids < vocab)).all())
    assert torch.equal(ids[~bad], greedy(logits)[~bad])
    assert torch.equal(largest.nan_to_num(7, 8, 9), expected_largest.nan_to_num(7, 8, 9))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(gpu.log_normalizers(logits), expected_lse, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["packed", "padded", "transposed", "every second"])
def test_normalizers_of_any_strides(kind: str, dtype: torch.dtype) -> None:
    logits = drawn(3, 130, dtype)
    close(gpu.log_normalizers(strided(logits, kind)), logits.double().logsumexp(-1))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [0.0, 1e-3, 100.0, 1e4, 1e38])
def test_normalizers_of_any_size(size: float) -> None:
    logits = drawn(2, 500, size=size)
    close(gpu.log_normalizers(logits), logits.double().logsumexp(-1))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_masked_ranges_have_no_mass_even_among_low_logits() -> None:
    logits = torch.full((2, 200), -torch.inf)
    logits[0, 150:160] = -1000.0
    logits[1, 3] = 3e38
    close(gpu.log_normalizers(logits), logits.double().logsumexp(-1))


def test_many_tokens_keep_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scan, "BLOCK", 4096)
    logits = drawn(1, 151_936, torch.bfloat16)
    exact = logits.double().logsumexp(-1)
    assert float((gpu.log_normalizers(logits) - exact).abs()) < 1e-6 * float(exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_token_logprobs(rows: int, vocab: int, known: bool, dtype: torch.dtype) -> None:
    logits = drawn(rows, vocab, dtype)
    tokens = tokens_of(logits)
    normalizers = pytorch.log_normalizers(logits) if known else None
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    close(gpu.token_logprobs(logits, tokens, normalizers), exact)
    close(pytorch.token_logprobs(logits, tokens, normalizers), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("vocab", "k"), [(3, 3), (100, 5), (63, 17)])
def test_top_logprobs(vocab: int, k: int, known: bool, dtype: torch.dtype) -> None:
    logits = strided(drawn(2, vocab, dtype), "padded")
    normalizers = pytorch.log_normalizers(logits) if known else None
    ids, values = gpu.top_logprobs(logits, k, normalizers)
    expected_ids, expected = pytorch.top_logprobs(logits, k, normalizers)
    assert torch.equal(ids, expected_ids)
    assert values.dtype == expected.dtype == torch.float32
    close(values, logits.double().log_softmax(-1).gather(1, ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 5, 17])
def test_gather_logprobs_equals_its_parts(k: int, dtype: torch.dtype) -> None:
    logits = drawn(3, 170, dtype)
    targets = tokens_of(logits)
    got, expected = gpu.gather_logprobs(logits, targets, k), pytorch.gather_logprobs(logits, targets, k)
    exact = logits.double().log_softmax(-1)
    close(got.normalizers, logits.double().logsumexp(-1))
    close(got.targets, exact.gather(1, targets[:, None])[:, 0])
    assert got.top_ids.shape == got.top.shape == (3, k)
    assert torch.equal(got.top_ids, expected.top_ids)
    close(got.top, exact.gather(1, got.top_ids))
    for name in ("normalizers", "targets", "top"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-6, atol=2e-6)


def test_no_rows() -> None:
    logits, none = torch.empty(0, 100), torch.empty(0, dtype=torch.int64)
    assert [len(t) for t in gpu.argmax_lse(logits)] == [0] * 4
    assert gpu.token_logprobs(logits, none).shape == (0,)
    assert gpu.gather_logprobs(logits, none, 3).top.shape == (0, 3)
    gpu.mask_tokens(torch.empty(2, 3), none, none)


def test_a_row_s_results_depend_only_on_the_row() -> None:
    logits = drawn(5, 400)
    whole = gpu.argmax_lse(logits)
    for row in range(5):
        assert all(
            torch.equal(a, b[row : row + 1]) for a, b in zip(gpu.argmax_lse(logits[row : row + 1]), whole, strict=True)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [1, 7, 200])
def test_masked_tokens(pairs: int, dtype: torch.dtype) -> None:
    logits = drawn(4, 37, dtype)
    expected = logits.clone()
    at = torch.randint(0, 4, (pairs, 2), generator=torch.Generator().manual_seed(pairs))  # columns of one tensor
    gpu.mask_tokens(logits, at[:, 0], at[:, 1])
    pytorch.mask_tokens(expected, at[:, 0], at[:, 1])
    assert torch.equal(logits, expected)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 200))
    number = st.floats(-50, 50, width=32) | st.sampled_from([-torch.inf, -0.0, 0.0, 50.0])
    rows = data.draw(st.lists(st.lists(number, min_size=vocab, max_size=vocab), min_size=1, max_size=2))
    logits = torch.tensor(rows)
    logits[:, data.draw(st.integers(0, vocab - 1))] = 1.5
    ids, largest, lse, bad = gpu.argmax_lse(logits)
    assert torch.equal(ids, greedy(logits))
    assert torch.equal(largest, logits.amax(-1))
    assert not bad.any()
    close(lse, logits.double().logsumexp(-1))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *(t.numel() for t in made)])
        return out


@pytest.mark.parametrize(
    ("kernels", "call"),
    [
        (2, lambda logits, tokens: gpu.argmax_lse(logits)),
        (2, lambda logits, tokens: gpu.log_normalizers(logits)),
        (2, lambda logits, tokens: gpu.token_logprobs(logits, tokens)),
        (4, lambda logits, tokens: gpu.top_logprobs(logits, 20)),
        (4, lambda logits, tokens: gpu.gather_logprobs(logits, tokens, 20)),
        (2, lambda logits, tokens: gpu.gather_logprobs(logits, tokens, 0)),
        (3, lambda logits, tokens: top.largest(logits, 20)),
    ],
)
def test_logits_are_read_once_and_never_copied(
    kernels: int, call: Callable[[Tensor, Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # use the real sizes
    logits = torch.empty(64, 151_936, dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(64, dtype=torch.int64, device="meta")
    started: list[tuple[str, int]] = []

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        started.append((kernel.__name__, grid[0]))

    with Largest() as largest, recording(note):
        call(logits, tokens)
    assert len(started) == kernels
    assert [grid for name, grid in started if name == "_scan_kernel"] == [64 * 38]
    assert largest.numbers <= logits.numel() // 16
