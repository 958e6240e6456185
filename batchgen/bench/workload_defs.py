"""The named workloads, and the workloads of TOML definition files.

Every named workload is also a definition file in configs/bench/.
"""

from __future__ import annotations

import tomllib
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
from batchgen.request.parser import RowDefaults, parse_row
from batchgen.request.prompts import ChatPrompt
from batchgen.text.tokenizer import Tokenizer

__all__ = [
    "GPU_WORKLOADS",
    "ITEM_SCHEMA",
    "MORE_WORKLOADS",
    "WORKLOADS",
    "BenchWorkload",
    "DemoWorkload",
    "find_workload",
    "find_workloads",
    "load_workload",
]

_UNIQUE: Final = (Level(64, (32, 256)),)

ITEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["note", "task", "event"]},
            "text": {"type": "string", "maxLength": 24},
            "score": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["kind", "text", "score"],
        "additionalProperties": False,
    },
}
"""Schema with objects, strings, numbers and enums whose shortest text takes thousands of tokens, so that no row ends
early."""

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("unique", "64 prompts of 32-256 tokens that share nothing, 64 out", _UNIQUE, (64, 64)),
        Workload(
            "shared-prefix",
            "64 prompts of 32 tokens after one prefix of 1,024, 32 out",
            (Level(1, (1024, 1024)), Level(64, (32, 32))),
            (32, 32),
        ),
        Workload(
            "few-shot-tree",
            "a root of 256 tokens, 8 groups of 512, 8 prompts of 32 in each, 32 out",
            (Level(1, (256, 256)), Level(8, (512, 512)), Level(8, (32, 32))),
            (32, 32),
        ),
        Workload("mixed-lengths", "64 prompts of 32-256 tokens, 8-256 out", _UNIQUE, (8, 256)),
    )
}
"""Default workloads, in this order."""

MORE_WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "multi-turn",
            "8 conversations of 8 turns, a row for each turn: 64-128 tokens, then 32-96 more each time, 32 out",
            (Level(8, (64, 128)), *[Level(1, (32, 96))] * 7),
            (32, 32),
            rows_at="nodes",
        ),
        Workload(
            "n-samples",
            "8 prompts of 32-256 tokens, 8 samples of each at temperature 1, 64 out",
            (Level(8, (32, 256)),),
            (64, 64),
            samples=8,
        ),
        Workload(
            "json-constrained",
            "unique, every second row constrained to a JSON schema",
            _UNIQUE,
            (64, 64),
            fields={"json_schema": ITEM_SCHEMA},
            every=2,
        ),
        Workload(
            "logprobs",
            "unique, with the logprobs of the 20 most likely tokens at every output position",
            _UNIQUE,
            (64, 64),
            fields={"return_logprob": True, "top_logprobs_num": 20},
        ),
        Workload(
            "hidden-states",
            "unique, with the last layer's hidden states of all output tokens, written to a Parquet file",
            _UNIQUE,
            (64, 64),
            fields={"return_hidden_states": {"layers": [-1], "tokens": "output"}},
        ),
        Workload(
            "many-loras",
            "unique, rows alternate between 8 random LoRA adapters of rank 8",
            _UNIQUE,
            (64, 64),
            adapters=AdapterSet(8),
        ),
    )
}
"""Workloads of other trees and of special rows; they run if named, or with `all`."""

GPU_WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "w-nano",
            "256 prompts of 100-1,024 tokens that share nothing, 100-1,024 out",
            (Level(256, (100, 1024)),),
            (100, 1024),
        ),
        Workload(
            "w-prefix",
            "4,096 prompts of 64 tokens after one prefix of 2,000, 128 out",
            (Level(1, (2000, 2000)), Level(4096, (64, 64))),
            (128, 128),
        ),
        Workload(
            "w-unshared",
            "4,096 prompts of 2,064 tokens that share nothing, 128 out: w-prefix without its prefix",
            (Level(4096, (2064, 2064)),),
            (128, 128),
        ),
        Workload(
            "w-tree",
            "a root of 300 tokens, 16 tasks of 1,200, 256 questions of 120 in each, 4 samples of 200 out",
            (Level(1, (300, 300)), Level(16, (1200, 1200)), Level(256, (120, 120))),
            (200, 200),
            samples=4,
        ),
    )
}
"""Workloads sized for a GPU; they run only if named, because a CPU takes hours."""


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Held-out rows of the demonstration model's tasks, which alternate.

    Every row generates the number of tokens of its expected answer plus one, the same for every engine.

    Raises:
        UsageError: `task_rows` is below 1.
    """

    name: str = "demo"
    description: str = "2,048 rows of the demonstration model's own tasks, each as long as its answer"
    task_rows: int = 2048
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
_CHECKABLE_FIELDS: Final = (
    "json_schema",
    "return_logprob",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_hidden_states",
)
"""Row fields that a definition may set and the gate can check; `lora_path` is set by `adapters`."""
_OPTIONAL_KEYS: Final = {"seed", "samples", "rows_at", "fields", "every", "adapters"}


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
    known: dict[str, BenchWorkload] = {**WORKLOADS, **MORE_WORKLOADS, "demo": DemoWorkload(), **GPU_WORKLOADS}
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
            task_rows=_integer(values["task_rows"], f"{path}: `task_rows`"),
            seed=_integer(values.get("seed", 0), f"{path}: `seed`"),
        )
    return _tree_workload(values, str(path))


def _tree_workload(values: Mapping[str, Any], where: str) -> Workload:
    _check_keys(values, {"name", "description", "levels", "output"}, _OPTIONAL_KEYS, where)
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
            Level(_integer(x["children"], f"{where}: `children`"), _pair(x["tokens"], f"{where}: `tokens`"))
            for x in levels
        ),
        output=_pair(values["output"], f"{where}: `output`"),
        seed=_integer(values.get("seed", 0), f"{where}: `seed`"),
        samples=_integer(values.get("samples", 1), f"{where}: `samples`"),
        rows_at=rows_at,
        fields=_fields(values.get("fields", {}), f"{where}: `fields`"),
        every=_integer(values.get("every", 1), f"{where}: `every`"),
        adapters=_adapters(values["adapters"], f"{where}: `adapters`") if "adapters" in values else None,
    )


def _fields(value: object, name: str) -> Mapping[str, Any]:
    """Row fields of special rows, limited to those that the gate can check."""
    table = _table(value, name)
    if unknown := sorted(table.keys() - set(_CHECKABLE_FIELDS)):
        hint = did_you_mean(unknown[0], _CHECKABLE_FIELDS)
        raise UsageError(
            f"{name}: the gate cannot check {unknown[0]!r}{hint}; it can check {', '.join(_CHECKABLE_FIELDS)}"
        )
    try:
        params = parse_row({"input_ids": [0], **table}, 0, RowDefaults()).params
    except RowError as error:
        raise UsageError(f"{name}: {error.info.message}") from None
    states = params.return_hidden_states
    if states is None:
        return table
    if states.tokens != "output" or states.pool != "none":
        raise UsageError(
            f'{name}: `return_hidden_states` must have tokens = "output" and no pool, so that the gate can count states'
        )
    return {**table, "return_hidden_states": {"layers": list(states.layers), "tokens": "output"}}


def _adapters(value: object, name: str) -> AdapterSet:
    table = _table(value, name)
    _check_keys(table, {"count"}, {"rank"}, name)
    return AdapterSet(_integer(table["count"], f"{name}: `count`"), _integer(table.get("rank", 8), f"{name}: `rank`"))


def _check_keys(values: Mapping[str, Any], needed: set[str], allowed: set[str], where: str) -> None:
    if unknown := values.keys() - needed - allowed:
        known = sorted(needed | allowed)
        problem = f"unknown key `{min(unknown)}`{did_you_mean(min(unknown), known)}"
        raise UsageError(f"{where}: {problem}; known: {', '.join(known)}")
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


def _integer(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    return value


def _pair(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{name} must be [least, most], got {value!r}")
    return _integer(value[0], name), _integer(value[1], name)
