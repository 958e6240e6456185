"""Random numbers on a device, and logits as models produce them, with ties, and with unusual strides."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("packed", "padded", "transposed", "every second")
"""Strides of a matrix: contiguous, with gaps between rows, column by column, every second row of a larger one."""


class Numbers:
    """Reproducible random tensors on one device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def seed(self, number: int) -> None:
        """Seed the random numbers of a case, so that they do not depend on earlier cases."""
        self._generator.manual_seed(number)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal random numbers with a standard deviation of `scale`, generated in float32."""
        return (scale * torch.randn(*shape, generator=self._generator, device=self.device)).to(dtype)

    def rand(self, *shape: int) -> Tensor:
        """Uniform random float32 numbers in [0, 1)."""
        return torch.rand(*shape, generator=self._generator, device=self.device)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform random int64 numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        """[count] int64: 0 to count - 1 in random order."""
        return self.rand(count).argsort()

    def distinct(self, high: int, rows: int, count: int) -> Tensor:
        """[rows, count] random int64 below `high`, distinct within each row."""
        return self.rand(rows, high).argsort(-1)[:, :count].contiguous()

    def logits(self, rows: int, vocab: int, dtype: torch.dtype = torch.float32, kind: str = "model") -> Tensor:
        """[rows, vocab] logits.

        Args:
            rows: number of rows.
            vocab: number of logits per row.
            dtype: dtype of the result; the numbers are generated in float32.
            kind: "model": flat and peaked rows, a tenth of them with masked tokens; "ties": few different values, among
                them both zeros and -inf, with at least one finite value a row; "equal": one value a row, of several;
                "rising" and "falling".
        """
        if kind in ("rising", "falling"):
            row = torch.arange(float(vocab), device=self.device) * (1 if kind == "rising" else -1)
            return row.repeat(rows, 1).to(dtype)
        if kind == "equal":
            values = torch.tensor([0.0, 0.25, -0.0, 25.0, -torch.inf], device=self.device)
            return values.repeat(rows)[:rows, None].repeat(1, vocab).to(dtype)
        if kind == "ties":
            values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 2.0, 2.0], device=self.device)
            logits = values[self.randint(0, len(values), rows, vocab)]
            logits[:, vocab // 2] = 0.0
            return logits.to(dtype)
        spread = 0.5 + 3.5 * self.rand(rows, 1)
        logits = self.randn(rows, vocab) * spread
        logits += 8 * spread * (self.rand(rows, vocab) < 8 / vocab)
        masked = (self.rand(rows, 1) < 0.1) & (self.rand(rows, vocab) < 0.4)
        masked[:, vocab // 2] = False
        return logits.masked_fill_(masked, -torch.inf).to(dtype)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The same matrix with the strides of one of `LAYOUTS`, between not-a-numbers."""
    rows, columns = matrix.shape
    if layout == "padded":
        wide = matrix.new_full((rows, columns + 5), torch.nan)
        wide[:, :columns] = matrix
        return wide[:, :columns]
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "every second":
        twice = matrix.new_full((2 * rows, columns), torch.nan)
        twice[::2] = matrix
        return twice[::2]
    return matrix.contiguous()
