"""`Constraint`: what the output text of a row must satisfy, and the kinds that there are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

from batchgen.request.checks import invalid

ConstraintKind = Literal[
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "choice",
    "tool_choice",
]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
"""Kinds of constraints, which are also the names of the parameters that give them."""
_values = attrgetter(*CONSTRAINT_KINDS)
_NOTHING = (None,) * len(CONSTRAINT_KINDS)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the output text. Equal constraints are compiled once."""

    kind: ConstraintKind
    text: str
    """JSON of a schema, a structural tag, the list of choices or the calls; else the pattern or grammar itself."""


def check_one(values: Any) -> None:
    """Check that a parameter set gives at most one constraint.

    Raises:
        RowError: `invalid_field`, naming the second one.
    """
    kinds = [kind for kind in CONSTRAINT_KINDS if getattr(values, kind) is not None]
    if len(kinds) > 1:
        raise invalid(kinds[1], f"cannot be combined with `{kinds[0]}`: a row has one constraint")


def constraint_of(values: Any) -> Constraint | None:
    """The constraint that a parameter set gives in the attribute of its kind, if it has one."""
    held = _values(values)
    if held == _NOTHING:  # of most rows, so found fast
        return None
    kind, value = next(pair for pair in zip(CONSTRAINT_KINDS, held, strict=True) if pair[1] is not None)
    return Constraint(kind, json.dumps(value, ensure_ascii=False) if kind == "choice" else value)
