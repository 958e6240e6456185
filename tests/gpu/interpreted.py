"""What Triton's interpreter is to do as a GPU does, and what it need not do again and again."""

from __future__ import annotations

from functools import cache
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


def quicken() -> None:
    """Have the interpreter look up what it computes anew at every operation: half of its time, and the same results.

    A call of one jitted function by another reads through all of Triton's language for what it has replaced already;
    every tensor and type has its shape unwrapped, checked and written out.
    """
    from triton.language import core
    from triton.runtime import interpreter

    replaced = (interpreter, "_patch_builtin"), (interpreter, "_patch_attr"), (interpreter, "_get_np_dtype")
    if getattr(interpreter, "_quickened", False) or not all(hasattr(*one) for one in replaced):
        return  # another version of Triton is as slow as it is
    interpreter._quickened = True

    builtins_of = cache(lambda package: [(n, f) for n in dir(package) if core.is_builtin(f := getattr(package, n))])

    def patch_builtin(package: Any, *how: Any) -> None:
        for name, member in builtins_of(package):
            if getattr(package, name) == member:
                interpreter._patch_attr(package, name, member, *how)

    numpy_of, numpy_types = interpreter._get_np_dtype, {}

    def get_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_of(kind)
        return numpy_types[name]

    # What a first one is given is kept; Triton changes neither afterwards.
    make_type, types = core.block_type.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in types:
            self.__dict__.update(types[key], element_ty=element_ty)
        else:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)

    make_tensor, tensors = core.tensor.__init__, {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key in tensors:
            self.__dict__.update(tensors[key], handle=handle, type=type, dtype=type.scalar)
        else:
            make_tensor(self, handle, type)
            tensors[key] = {"shape": self.shape, "numel": self.numel}

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
