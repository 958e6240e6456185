"""Which workload a name or a definition file means."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from batchgen.errors import RowError, UsageError
from batchgen.job.bench.config import ALONE, meant
from batchgen.job.bench.demo_rows import DemoWorkload
from batchgen.job.bench.named import GPU_WORKLOADS, MORE_WORKLOADS, WORKLOADS
from batchgen.job.bench.workloads import AdapterSet, Level, RowsAt, Workload
from batchgen.rows import RowDefaults, parse_row

__all__ = ["BenchWorkload", "find_workload", "find_workloads", "load_workload"]

BenchWorkload = Workload | DemoWorkload

_ALL: Final = "all"
_CHECKED: Final = (
    "json_schema",
    "return_logprob",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_hidden_states",
)
"""Fields of rows; `lora_path` is `adapters`."""
_OPTIONAL: Final = {"seed", "samples", "rows_at", "fields", "every", "adapters"}


def find_workloads(names: Sequence[str], *, demo: bool = False) -> list[BenchWorkload]:
    """The workloads that a command line means: those named, `all` for every one that is sized for a CPU and works with
    any model, and where none is named the four plain ones, or with the demonstration model its own.

    Raises:
        UsageError: as `find_workload`, or one is named twice.
    """
    found: list[BenchWorkload] = []
    for name in names or (("demo",) if demo else WORKLOADS):
        found += (WORKLOADS | MORE_WORKLOADS).values() if name == _ALL else [find_workload(name)]
    for number, workload in enumerate(found):
        if workload.name in {other.name for other in found[:number]}:
            raise UsageError(f"workload {workload.name} is named twice")
    return found


def find_workload(name: str) -> BenchWorkload:
    """A named workload, or the definition in a .toml file.

    Raises:
        UsageError: there is none of this name, or the file is wrong.
    """
    if name.endswith(".toml"):
        return load_workload(Path(name))
    known: dict[str, BenchWorkload] = {**WORKLOADS, **MORE_WORKLOADS, "demo": DemoWorkload(), **GPU_WORKLOADS}
    if name not in known:
        names = [*known, *ALONE, _ALL]
        raise UsageError(
            f"unknown workload {name!r}{meant(name, names)}; take one of {', '.join(names)}, or a .toml file"
        )
    return known[name]


def load_workload(path: Path) -> BenchWorkload:
    """Read a definition: a tree of random ids (`levels`, `output`), or rows of the demonstration model's tasks
    (`task_rows`).

    Raises:
        UsageError: it cannot be read, or a key is missing, unknown or wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the workload {path}: {error.strerror}; give the path of a definition file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    if "task_rows" in values:
        _check_keys(values, {"name", "description", "task_rows"}, {"seed"}, str(path))
        return DemoWorkload(
            name=_text(values["name"], f"{path}: `name`"),
            description=_text(values["description"], f"{path}: `description`"),
            task_rows=_whole(values["task_rows"], f"{path}: `task_rows`"),
            seed=_whole(values.get("seed", 0), f"{path}: `seed`"),
        )
    return _tree_workload(values, str(path))


def _tree_workload(values: Mapping[str, Any], where: str) -> Workload:
    _check_keys(values, {"name", "description", "levels", "output"}, _OPTIONAL, where)
    levels = values["levels"]
    if not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels):
        raise UsageError(f"{where}: `levels` must be tables, as in [[levels]]")
    for level in levels:
        _check_keys(level, {"children", "tokens"}, set(), f"{where}: `levels`")
    rows_at = values.get("rows_at", "leaves")
    if rows_at not in get_args(RowsAt):
        raise UsageError(f"{where}: `rows_at` must be one of {', '.join(get_args(RowsAt))}, got {rows_at!r}")
    return Workload(
        name=_text(values["name"], f"{where}: `name`"),
        description=_text(values["description"], f"{where}: `description`"),
        levels=tuple(
            Level(_whole(x["children"], f"{where}: `children`"), _pair(x["tokens"], f"{where}: `tokens`"))
            for x in levels
        ),
        output=_pair(values["output"], f"{where}: `output`"),
        seed=_whole(values.get("seed", 0), f"{where}: `seed`"),
        samples=_whole(values.get("samples", 1), f"{where}: `samples`"),
        rows_at=rows_at,
        fields=_fields(values.get("fields", {}), f"{where}: `fields`"),
        every=_whole(values.get("every", 1), f"{where}: `every`"),
        adapters=_adapters(values["adapters"], f"{where}: `adapters`") if "adapters" in values else None,
    )


def _fields(value: object, name: str) -> Mapping[str, Any]:
    """What rows ask for beside tokens, as far as the gate can tell that it came and changed nothing else."""
    table = _table(value, name)
    if odd := sorted(table.keys() - _CHECKED):
        raise UsageError(
            f"{name}: the gate cannot check {odd[0]!r}{meant(odd[0], _CHECKED)}; it can check {', '.join(_CHECKED)}"
        )
    try:
        params = parse_row({"input_ids": [0], **table}, 0, RowDefaults()).params
    except RowError as error:
        raise UsageError(f"{name}: {error.info.message}") from None
    states = params.return_hidden_states
    if states is None:
        return table
    if states.tokens != "output" or states.pool != "none":
        raise UsageError(f'{name}: `return_hidden_states` must have tokens = "output" and no pool: those are counted')
    return {**table, "return_hidden_states": {"layers": list(states.layers), "tokens": "output"}}


def _adapters(value: object, name: str) -> AdapterSet:
    table = _table(value, name)
    _check_keys(table, {"count"}, {"rank"}, name)
    return AdapterSet(_whole(table["count"], f"{name}: `count`"), _whole(table.get("rank", 8), f"{name}: `rank`"))


def _check_keys(values: Mapping[str, Any], needed: set[str], allowed: set[str], where: str) -> None:
    if unknown := values.keys() - needed - allowed:
        known = sorted(needed | allowed)
        told = f"unknown key `{min(unknown)}`{meant(min(unknown), known)}"
        raise UsageError(f"{where}: {told}; known: {', '.join(known)}")
    if missing := needed - values.keys():
        raise UsageError(f"{where}: `{min(missing)}` is missing")


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a table")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a text")
    return value


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    return value


def _pair(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{name} must be [least, most], got {value!r}")
    return _whole(value[0], name), _whole(value[1], name)
