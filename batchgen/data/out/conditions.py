"""Conditions on the columns of results: `finish_reason=length`, `error.code!=oom`, `seed>=100`, `text~Paris`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import UsageError

_FORM: Final = re.compile(r"(.+?)\s*(!=|<=|>=|==|=|<|>|~)\s*(.*)", re.DOTALL)
_COMPARED: Final = {
    "=": pc.equal, "==": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater,
    ">=": pc.greater_equal,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a column with a value."""

    text: str
    """As it was written."""
    column: str
    """Name of a column, or of a part of one, such as `error.code`."""
    sign: str
    value: str

    @staticmethod
    def parse(text: str) -> Condition:
        """The condition that a text states.

        Raises:
            UsageError: it is not a column, a sign and a value.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(
                f"`--where` {text!r} must be a column, one of = != < <= > >= ~ (contains), and a value, "
                "such as finish_reason=length"
            )
        return Condition(text, match[1].strip(), match[2], match[3])

    def mask(self, table: pa.Table) -> pa.Array:
        """Which rows meet the condition. A null equals only `null`; a column that the table lacks is all null.

        Raises:
            UsageError: the column's type cannot be compared with the value.
        """
        column = column_of(table, self.column)
        if self.value == "null" and self.sign in ("=", "==", "!="):
            return pc.is_valid(column) if self.sign == "!=" else pc.is_null(column)
        if pa.types.is_null(column.type):
            met = pa.chunked_array([pa.nulls(len(table), pa.bool_())])
        elif self.sign == "~":
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise UsageError(f"`--where` {self.text}: `{self.column}` is {column.type}; ~ looks into text")
            met = pc.match_substring(column, self.value)
        else:
            met = _COMPARED[self.sign](column, self._as(column.type))
        return pc.fill_null(met, pa.scalar(self.sign == "!="))

    def _as(self, kind: pa.DataType) -> pa.Scalar:
        if pa.types.is_nested(kind):
            raise UsageError(
                f"`--where` {self.text}: `{self.column}` is {kind}; compare text, a number, or a part as in error.code"
            )
        try:
            return pa.scalar(self.value).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UsageError(f"`--where` {self.text}: `{self.column}` is {kind}, not {self.value!r}") from None


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column, or a part of one by the names on the way to it with dots between; nulls if the table has none."""
    root = root_of(table.schema.names, name)
    if root is None:
        return pa.chunked_array([pa.nulls(len(table))])
    column = table[root]
    for part in filter(None, name[len(root) :].split(".")):
        column = pc.struct_field(column, part)
    return column


def root_of(names: Sequence[str], name: str) -> str | None:
    """The column among `names` that a column or a part of one is in; None if there is none."""
    return name if name in names else next((each for each in names if name.startswith(f"{each}.")), None)


def check_columns(names: Sequence[str], schemas: Sequence[pa.Schema], option: str) -> None:
    """Check that each column, or part of one, is in one of the schemas.

    Raises:
        UsageError: one is not; the message names the nearest one.
    """
    known: dict[str, None] = {}
    for schema in schemas:
        for field in schema:
            known[field.name] = None
            known |= dict.fromkeys(f"{field.name}.{part.name}" for part in field.type) if _is_struct(field) else {}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(known)}"
            raise UsageError(f"`{option}` {name}: the results have no such column; {hint}")


def _is_struct(field: pa.Field) -> bool:
    return bool(pa.types.is_struct(field.type))
