"""Workloads of TOML definition files; those of the folder `definitions/` have names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from batchgen.bench.config import ENGINELESS_WORKLOADS, did_you_mean
from batchgen.bench.demo_tasks.tasks import TASKS, draw
from batchgen.bench.workloads import AdapterSet, BenchRow, Level, RowsAt, Workload
from batchgen.demo import model_path
from batchgen.errors import RowError, UsageError
from batchgen.request.foreign_text import ForeignTextError, file_content, read_toml
from batchgen.request.parser import parse_row
from batchgen.request.prompts import ChatPrompt
from batchgen.request.row_values import RowDefaults
from batchgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Held-out rows of the demonstration model's tasks, which alternate.

    Every row generates the number of tokens of its expected answer plus one, the same for every engine.

    Raises:
        UsageError: `task_rows` is below 1.
    """

    name: str
    description: str
    task_rows: int
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapters: AdapterSet | None = None
    samples: int = 1
    special: bool = False

    def __post_init__(self) -> None:
        if self.task_rows < 1:
            raise UsageError(f"workload {self.name}: `task_rows` must be at least 1")

    @property
    def longest(self) -> int:
        """Number of positions of the longest row."""
        return max(len(row.ids) + row.max_new for row in _rows(self.task_rows, self.seed))

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows, in ids of the demonstration model.

        Raises:
            UsageError: `vocab_size` is not that of the demonstration model.
        """
        known = _tokenizer().vocab_size
        if vocab_size != known:
            raise UsageError(
                f"workload {self.name} needs the demonstration model's vocabulary of {known} ids, the model has "
                f"{vocab_size}; give --model demo"
            )
        return list(_rows(self.task_rows, self.seed))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path())


@cache
def _rows(count: int, seed: int) -> tuple[BenchRow, ...]:
    tokenizer = _tokenizer()
    names = list(TASKS)
    examples = [draw("heldout", seed, number, names[number % len(names)]) for number in range(count)]
    prompts = [
        tokenizer.encode_chat(ChatPrompt(tuple(example.messages())))
        if example.chat
        else tokenizer.encode([example.content.raw])[0]
        for example in examples
    ]
    answers = tokenizer.encode_plain([example.content.answer for example in examples])
    return tuple(BenchRow(ids, len(answer) + 1) for ids, answer in zip(prompts, answers, strict=True))


BenchWorkload = Workload | DemoWorkload

_ALL: Final = "all"
_DEFINITIONS: Final = Path(__file__).parent / "definitions"
_CHECKABLE_FIELDS: Final = (
    "json_schema",
    "return_logprob",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_hidden_states",
)
"""Row fields that a definition may set and the gate can check; `lora_path` is set by `adapters`."""


def find_workloads(names: Sequence[str], *, demo: bool = False) -> list[BenchWorkload]:
    """The workloads of a command line.

    Args:
        names: names or .toml files; `all` means `WORKLOADS` and `MORE_WORKLOADS`; none means `WORKLOADS`.
        demo: whether the model is the demonstration model, for which none means workload `demo`.

    Raises:
        UsageError: as `find_workload`, or a workload is given more than once.
    """
    found: list[BenchWorkload] = []
    for name in names or (("demo",) if demo else WORKLOADS):
        found += (WORKLOADS | MORE_WORKLOADS).values() if name == _ALL else [find_workload(name)]
    for number, workload in enumerate(found):
        if workload.name in {other.name for other in found[:number]}:
            raise UsageError(f"workload {workload.name} is given more than once")
    return found


def find_workload(name: str) -> BenchWorkload:
    """The workload of a name or of a .toml file.

    Raises:
        UsageError: the name is unknown, or the file is wrong.
    """
    if name.endswith(".toml"):
        return load_workload(Path(name))
    known: dict[str, BenchWorkload] = {
        **WORKLOADS,
        **MORE_WORKLOADS,
        "demo": load_workload(_DEFINITIONS / "demo.toml"),
        **GPU_WORKLOADS,
    }
    if name not in known:
        names = [*known, *ENGINELESS_WORKLOADS, _ALL]
        raise UsageError(
            f"unknown workload {name!r}{did_you_mean(name, names)}; use one of {', '.join(names)}, or a .toml file"
        )
    return known[name]


def load_workload(path: Path) -> BenchWorkload:
    """Read a definition file: a tree of random ids (`levels`, `output`), or rows of the demonstration model's tasks
    (`task_rows`).

    Raises:
        UsageError: the file cannot be read, or a key is missing, unknown or wrong.
    """
    try:
        table = _Table(read_toml(file_content(path)), str(path))
    except OSError as error:
        raise UsageError(
            f"cannot read the workload {path}: {error.strerror}; give the path of a definition file"
        ) from None
    except ForeignTextError as error:
        raise UsageError(f"{path} {error}") from None
    if "task_rows" in table.values:
        table.check_keys({"name", "description", "task_rows"}, {"seed"})
        about = table.text("name"), table.text("description")
        return DemoWorkload(*about, task_rows=table.integer("task_rows"), seed=table.integer("seed", 0))
    return _tree_workload(table)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a definition file, whose values are checked when they are read.

    Raises:
        UsageError: in every method, for a wrong value; the message begins with `where`.
    """

    values: Mapping[str, Any]
    where: str

    def check_keys(self, needed: set[str], allowed: set[str]) -> None:
        """Check that all of `needed` are given, and nothing else but `allowed`."""
        if unknown := self.values.keys() - needed - allowed:
            known = sorted(needed | allowed)
            problem = f"unknown key `{min(unknown)}`{did_you_mean(min(unknown), known)}"
            raise UsageError(f"{self.where}: {problem}; known: {', '.join(known)}")
        if missing := needed - self.values.keys():
            raise UsageError(f"{self.where}: `{min(missing)}` is missing")

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self.values[key]
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.where}: `{key}` must be a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        return self._integer(self.values.get(key, default), key)

    def pair(self, key: str) -> tuple[int, int]:
        """The least and the most of a range."""
        value = self.values[key]
        if not isinstance(value, list) or len(value) != 2:
            raise UsageError(f"{self.where}: `{key}` must be [least, most], got {value!r}")
        return self._integer(value[0], key), self._integer(value[1], key)

    def table(self, key: str) -> _Table:
        """A table, empty if it is not given."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise UsageError(f"{self.where}: `{key}` must be a table")
        return _Table(value, f"{self.where}: `{key}`")

    def _integer(self, value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{self.where}: `{key}` must be a whole number, got {value!r}")
        return value


def _tree_workload(table: _Table) -> Workload:
    optional = {"seed", "samples", "rows_at", "fields", "every", "adapters"}
    table.check_keys({"name", "description", "levels", "output"}, optional)
    levels = table.values["levels"]
    if not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels):
        raise UsageError(f"{table.where}: `levels` must be tables, as in [[levels]]")
    for level in levels:
        _Table(level, f"{table.where}: `levels`").check_keys({"children", "tokens"}, set())
    rows_at = table.values.get("rows_at", "leaves")
    if rows_at not in get_args(RowsAt):
        raise UsageError(f"{table.where}: `rows_at` must be one of {', '.join(get_args(RowsAt))}, got {rows_at!r}")
    made = [_Table(level, table.where) for level in levels]
    return Workload(
        name=table.text("name"),
        description=table.text("description"),
        levels=tuple(Level(level.integer("children"), level.pair("tokens")) for level in made),
        output=table.pair("output"),
        seed=table.integer("seed", 0),
        samples=table.integer("samples", 1),
        rows_at=rows_at,
        fields=_fields(table.table("fields")),
        every=table.integer("every", 1),
        adapters=_adapters(table.table("adapters")) if "adapters" in table.values else None,
    )


def _fields(table: _Table) -> Mapping[str, Any]:
    """Row fields of special rows, limited to those that the gate can check."""
    if unknown := sorted(table.values.keys() - set(_CHECKABLE_FIELDS)):
        hint = did_you_mean(unknown[0], _CHECKABLE_FIELDS)
        raise UsageError(
            f"{table.where}: the gate cannot check {unknown[0]!r}{hint}; it can check {', '.join(_CHECKABLE_FIELDS)}"
        )
    try:
        params = parse_row({"input_ids": [0], **table.values}, 0, RowDefaults()).params
    except RowError as error:
        raise UsageError(f"{table.where}: {error.info.message}") from None
    states = params.return_hidden_states
    if states is None:
        return table.values
    if states.tokens != "output" or states.pool != "none":
        raise UsageError(
            f'{table.where}: `return_hidden_states` must have tokens = "output" and no pool, so that the gate can '
            "count states"
        )
    return {**table.values, "return_hidden_states": {"layers": list(states.layers), "tokens": "output"}}


def _adapters(table: _Table) -> AdapterSet:
    table.check_keys({"count"}, {"rank"})
    return AdapterSet(table.integer("count"), table.integer("rank", 8))


def _named(*names: str) -> dict[str, Workload]:
    """Named workloads of random ids."""
    found = {name: load_workload(_DEFINITIONS / f"{name}.toml") for name in names}
    return {name: workload for name, workload in found.items() if isinstance(workload, Workload)}


WORKLOADS = _named("unique", "shared-prefix", "few-shot-tree", "mixed-lengths")
"""Default workloads, in this order."""
MORE_WORKLOADS = _named("multi-turn", "n-samples", "json-constrained", "logprobs", "hidden-states", "many-loras")
"""Workloads of other trees and of special rows; they run if named, or with `all`."""
GPU_WORKLOADS = _named("w-nano", "w-prefix", "w-unshared", "w-tree")
"""Workloads sized for a GPU; they run only if named, because a CPU takes hours."""
