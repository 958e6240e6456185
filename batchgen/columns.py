"""`Columns`: what grows in flat arrays can be taken out, and put back into another one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

__all__ = ["Columns"]


class Columns:
    """A base for what keeps a number of each kind for every row, prompt or blob, appended one by one."""

    _columns: ClassVar[tuple[str, ...]]
    """Attributes that are `array`s, and all there is to know of an object."""

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all, by name without underscore."""
        return {name.lstrip("_"): np.array(getattr(self, name)) for name in self._columns}

    def fill(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put what `columns` of another such object gave in the place of what is here.

        Raises:
            KeyError: one is missing.
            ValueError: one is of another type.
        """
        for name in self._columns:
            values, target = columns[name.lstrip("_")], getattr(self, name)
            if values.dtype != np.dtype(target.typecode) or values.ndim != 1:
                raise ValueError(f"{name} is of {values.dtype}")
            setattr(self, name, array(target.typecode, values.tobytes()))
