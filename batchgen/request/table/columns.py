"""Columns of integers, one value per row, prompt or blob, that need few bytes and can be saved and restored."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 1 << 13
"""Number of values after which a column is packed."""
_MAX_STEP: Final = 1 << 30
"""Largest step of a line, so that computing it does not overflow."""
_TYPES: Final = "bhiq"
"""Type codes of the values that a column stores, the narrowest first."""


class Column:
    """Append-only column of integers, stored in as few bytes as its values allow.

    While each value exceeds the one before it by the same step, as in a constant column or in row indexes without gaps,
    only the first one and the step are stored; other values have the narrowest type that holds all of them. The values
    added last are in `tail`, until its owner calls `pack`.

    Args:
        typecode: type of the values, `B`, `i` or `q`.
        narrowest: narrowest type of stored values.
    """

    __slots__ = ("_count", "_first", "_narrowest", "_step", "_values", "append", "dtype", "tail", "typecode")

    def __init__(self, typecode: str, narrowest: str = "b") -> None:
        self.typecode = typecode
        self.dtype = np.dtype(typecode)
        self.tail = array(typecode)
        """Values that are not packed yet."""
        self.append = self.tail.append
        """Add a value."""
        self._narrowest = narrowest
        self._count = 0
        """Number of packed values."""
        self._first = self._step = 0
        self._values: array[int] | None = None
        """The packed values; None while value i is `_first + i * _step`."""

    def __len__(self) -> int:
        return self._count + len(self.tail)

    def __getitem__(self, index: int) -> int:
        """The value at `index`, which is at least 0.

        Raises:
            IndexError: there is none.
        """
        if index >= self._count:
            return self.tail[index - self._count]
        return self._first + index * self._step if self._values is None else self._values[index]

    def is_index(self, index: int) -> bool:
        """Whether the values up to the one after `index`, which all are packed, are their indexes: 0, 1, 2, ..."""
        return self._values is None and not self._first and self._step == 1 and index + 1 < self._count

    def pack(self) -> None:
        """Store the tail with the other values."""
        if self.tail:
            self._add(np.array(self.tail, self.dtype))
            del self.tail[:]

    def values(self) -> npt.NDArray[Any]:
        """[N] all values, read-only, in their declared type."""
        return self.stored().astype(self.dtype, copy=False)

    def stored(self) -> npt.NDArray[Any]:
        """[N] all values, read-only, in the type that is stored: without a copy, unless they rise by a step."""
        self.pack()
        if self._values is not None:
            return np.frombuffer(self._values, self._values.typecode)
        if self._step == 0:
            return np.broadcast_to(self.dtype.type(self._first), self._count)
        return self._line(self._count)

    def replace(self, values: npt.NDArray[Any]) -> None:
        """Replace all values; they have the declared type."""
        self._count, self._step, self._values = 0, 0, None
        del self.tail[:]
        for start in range(0, len(values), _BLOCK):
            self._add(values[start : start + _BLOCK])

    @property
    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        return 0 if self._values is None else len(self._values) * self._values.itemsize

    def _line(self, count: int, start: int = 0) -> npt.NDArray[Any]:
        """Values `start` to `start + count` of the line, in the declared type."""
        if not self._step:
            return np.full(count, self._first, self.dtype)
        return (np.arange(start, start + count) * self._step + self._first).astype(self.dtype, copy=False)

    def _add(self, block: npt.NDArray[Any]) -> None:
        if self._values is None:
            if not self._count:
                self._first = int(block[0])
            if self._count < 2 and self._count + len(block) > 1:
                step = int(block[1 - self._count]) - self._first
                self._step = step if abs(step) <= _MAX_STEP else 0
            if self._is_line(block):
                self._count += len(block)
                return
            self._values = array(self._narrowest)
            for start in range(0, self._count, _BLOCK):
                self._store(self._line(min(_BLOCK, self._count - start), start))
        self._store(block)
        self._count += len(block)

    def _is_line(self, block: npt.NDArray[Any]) -> bool:
        last = self._first + (self._count + len(block) - 1) * self._step  # not wrapped to the declared type
        return last == block[-1] and np.array_equal(self._line(len(block), self._count), block)

    def _store(self, block: npt.NDArray[Any]) -> None:
        assert self._values is not None
        least, most = int(block.min()), int(block.max())
        wide = next(code for code in _TYPES if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
        if np.dtype(wide).itemsize > self._values.itemsize:
            wider = np.frombuffer(self._values, self._values.typecode).astype(wide)
            self._values = array(wide)
            self._values.frombytes(wider.view(np.uint8).data)
        self._values.frombytes(block.astype(self._values.typecode).view(np.uint8).data)


class Columns:
    """Object whose whole content is a few columns."""

    _columns: ClassVar[tuple[str, ...]]
    """Names of the `Column` attributes; together they are the object's whole content."""

    def pack(self, column: Column) -> None:
        """Pack all columns if the tail of this one is long. Call it before a value is added to each."""
        if len(column.tail) >= _BLOCK:
            for name in self._columns:
                getattr(self, name).pack()

    def columns(self) -> Mapping[str, npt.NDArray[Any]]:
        """The columns as read-only arrays of their declared types, by attribute name without the leading underscore."""
        return dict(self.each_column())

    def each_column(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """The items of `columns()`, made one after the other."""
        return ((name.lstrip("_"), getattr(self, name).values()) for name in self._columns)

    def restore_columns(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace the content by the `columns()` of another object.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another dtype or is not one-dimensional.
        """
        for name in self._columns:
            values, target = columns[name.lstrip("_")], getattr(self, name)
            if values.dtype != target.dtype or values.ndim != 1:
                raise ValueError(f"{name} has dtype {values.dtype} and shape {values.shape}")
            target.replace(values)
