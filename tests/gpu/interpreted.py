"""What Triton's interpreter is to do as a GPU does."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class _Set(Protocol):
    """`setattr`, or that of pytest's `monkeypatch`."""

    def __call__(self, target: Any, name: str, value: Any, /) -> None: ...


def sum_rows_alike(set_attribute: _Set = setattr) -> None:
    """Have the interpreter's products add up every row of a tile in one order, as tensor cores do.

    It multiplies by numpy's BLAS, whose last rows of a tile have a kernel of their own on some processors (AVX2): then
    a row's bits depend on where it stands, which is what `--deterministic` is proved not to let happen.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        kind = d.data.dtype
        product = np.einsum("...ik,...kj->...ij", a.data.astype(kind), b.data.astype(kind))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    set_attribute(interpreter.InterpreterBuilder, "create_dot", create_dot)
