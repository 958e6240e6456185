"""Base class of objects whose whole content is a few flat arrays that can be saved and restored."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


class Columns:
    """Object stored as append-only arrays, one value per row, prompt or blob in each."""

    _columns: ClassVar[tuple[str, ...]]
    """Names of the `array` attributes; together they are the object's whole content."""

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the arrays by attribute name, without the leading underscore."""
        return {name.lstrip("_"): np.array(getattr(self, name)) for name in self._columns}

    def restore_columns(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace the content by the `columns()` of another object.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another dtype or is not one-dimensional.
        """
        for name in self._columns:
            values, target = columns[name.lstrip("_")], getattr(self, name)
            if values.dtype != np.dtype(target.typecode) or values.ndim != 1:
                raise ValueError(f"{name} has dtype {values.dtype} and shape {values.shape}")
            setattr(self, name, array(target.typecode, values.tobytes()))
