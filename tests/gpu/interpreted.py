"""Patches of Triton's interpreter: the summation order of a GPU, and caches that make it faster."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import numpy as np


class _Set(Protocol):
    """Type of `setattr` and of `monkeypatch.setattr`."""

    def __call__(self, target: Any, name: str, value: Any, /) -> None: ...


def fix_row_summation_order(set_attribute: _Set = setattr) -> None:
    """Make the interpreter's products sum every row of a tile in the same order, as tensor cores do.

    The interpreter multiplies with numpy's BLAS, which on some processors (AVX2) uses another kernel for the last rows
    of a tile. Then a row's bits depend on its position, which tests of `--deterministic` must not see.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        kind = d.data.dtype
        product = np.einsum("...ik,...kj->...ij", a.data.astype(kind), b.data.astype(kind))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    set_attribute(interpreter.InterpreterBuilder, "create_dot", create_dot)


def speed_up_interpreter() -> None:
    """Cache what the interpreter recomputes at every operation. Results do not change.

    Each call between jitted functions searches all of Triton's language for functions to patch, and each tensor and
    type unwraps and checks its shape.
    """
    from triton.language import core
    from triton.runtime import interpreter

    replaced = (interpreter, "_patch_builtin"), (interpreter, "_patch_attr"), (interpreter, "_get_np_dtype")
    if getattr(interpreter, "_quickened", False) or not all(hasattr(*one) for one in replaced):
        return  # patched before, or another version of Triton
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

    # Attributes of the first type and tensor of a shape are reused; Triton does not change them afterwards.
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
