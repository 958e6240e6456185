"""The tables of other systems' names in `other-systems.md`: what happens here with each name, as the parser has it."""

from __future__ import annotations

from batchgen.config.engine_config import FLAGS_OF_OTHERS
from batchgen.request.fields.declared import LOOKUP
from batchgen.request.fields.other_systems import ANSWERS, NAMES, snake_case


def tables() -> str:
    """For each system a table of its names, those with the same outcome in one row."""
    return "\n".join(map(_table, NAMES)) + "\n"


def flags() -> str:
    """The table of other systems' flags."""
    rows = (f"| `{flag}` | `{own}` |" for flag, own in FLAGS_OF_OTHERS.items())
    return "\n".join(["| flag | here |", "|---|---|", *rows, ""])


def _table(system: str) -> str:
    by_outcome: dict[str, list[str]] = {}
    for name in NAMES[system]:
        by_outcome.setdefault(_outcome(name), []).append(f"`{name}`")
    rows = (f"| {', '.join(names)} | {outcome} |" for outcome, names in sorted(by_outcome.items(), key=_order))
    return "\n".join([f"### {system}", "", "| name | here |", "|---|---|", *rows, ""])


def _order(item: tuple[str, list[str]]) -> tuple[bool, bool]:
    """What runs first, then other names of fields, then what is refused, in the order of the system's names."""
    return (item[0].startswith("refused"), not item[0].startswith("runs"))


def _outcome(name: str) -> str:
    place = next((place for place in LOOKUP if name in LOOKUP[place]), None)
    written = snake_case(name)
    if place is not None:
        field = LOOKUP[place][name]
        where = "" if place in ("row", "params") else " in the body of an OpenAI line"
        if field.carried:
            return f"carried{where}"
        if not field.supported:
            return f"refused{where}, unless it asks for nothing: {field.remedy}"
        if where:
            return f"accepted{where}"
        return "runs" if name == field.name else f"another name of `{field.name}`"
    if name == "sampling_params":
        return "runs"
    if written in LOOKUP["row"]:
        return f"refused: write `{written}`"
    return f"refused: {ANSWERS[written].advice}"
