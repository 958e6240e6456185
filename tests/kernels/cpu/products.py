"""Helpers for tests of all kinds of products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["Problem", "assert_same_bits_in_every_batch", "problems", "randn", "with_threads"]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Problem:
    """A random product: sizes, scale of the numbers, and number of threads."""

    rows: int
    inner: int
    outer: int
    biased: bool
    threads: int
    scale: float
    seed: int

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [M, K], W [N, K] and b [N], float32."""
        x = (randn(self.rows, self.inner, seed=self.seed) * self.scale).to(dtype)
        weight = randn(self.outer, self.inner, dtype=dtype, seed=self.seed + 1)
        return x, weight, randn(self.outer, seed=self.seed + 2) * self.scale if self.biased else None

    def terms(self, dtype: torch.dtype) -> Tensor:
        """[M, N] sums of the magnitudes of the terms."""
        x, weight, bias = self.tensors(dtype)
        return x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())


def problems() -> st.SearchStrategy[Problem]:
    """Strategy for random problems, odd sizes and extreme scales included."""
    return st.builds(
        Problem,
        rows=st.integers(0, 80) | st.integers(81, 300),
        inner=st.integers(1, 450),
        outer=st.integers(1, 120),
        biased=st.booleans(),
        threads=st.integers(1, 9),
        scale=st.sampled_from([1e-12, 1.0, 1e12]),
        seed=st.integers(0, 99),
    )


def assert_same_bits_in_every_batch(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check rows of x [150, K] alone, in batches around every block size of the kernels, and with 1 to 33 threads."""
    whole = product(x)
    for begin, end in [(0, 1), (3, 5), (1, 8), (0, 8), (2, 11), (7, 23), (70, 95), (5, 69), (9, 90), (149, 150)]:
        assert torch.equal(product(x[begin:end]), whole[begin:end])
    for threads in (1, 2, 3, 7, 33):
        with with_threads(threads):
            assert torch.equal(product(x), whole)
