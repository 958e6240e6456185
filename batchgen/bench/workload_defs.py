"""Workloads of TOML definition files; those of the folder `definitions/` have names."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import numpy as np

from batchgen.bench.config import ENGINELESS_WORKLOADS, did_you_mean
from batchgen.bench.demo_tasks.tasks import TASKS, draw
from batchgen.bench.workloads import AdapterSet, BenchRow, Level, RowsAt, Workload, check_range
from batchgen.demo import model_path
from batchgen.errors import RowError, UsageError
from batchgen.media.images import image_of
from batchgen.request.foreign_text import ForeignTextError, file_content, read_toml
from batchgen.request.parser import parse_row
from batchgen.request.prompts import ChatPrompt
from batchgen.request.row_values import RowDefaults
from batchgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Held-out rows of the demonstration model's tasks, which alternate.

    Each is as long as its expected answer and one token more.
    """

    count: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Distinct pictures, each after one of the instructions, which are random ids."""

    count: int
    instructions: int
    length: tuple[int, int]
    """The least and the most tokens of an instruction."""
    output: tuple[int, int]
    """The least and the most new tokens of a row."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Rows of the demonstration model, in its ids: held-out rows of its tasks, or pictures with questions.

    Every row generates a fixed number of tokens, the same for every engine.
    """

    name: str
    description: str
    kind: TaskRows | PictureRows
    fields: ClassVar[Mapping[str, Any]] = {}
    adapters: ClassVar[AdapterSet | None] = None
    samples: ClassVar[int] = 1
    special: ClassVar[bool] = False

    @property
    def pictures(self) -> bool:
        """Whether rows have pictures."""
        return isinstance(self.kind, PictureRows)

    @property
    def longest(self) -> int:
        """Number of positions of the longest row."""
        return max(len(row.ids) + row.max_new for row in _rows(self.kind))

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows.

        Raises:
            UsageError: `vocab_size` is not that of the demonstration model, or rows have pictures and the library that
                makes them is missing.
        """
        known = _tokenizer().vocab_size
        if vocab_size != known:
            raise UsageError(
                f"workload {self.name} needs the demonstration model's vocabulary of {known} ids, the model has "
                f"{vocab_size}; give --model demo"
            )
        return list(_rows(self.kind))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path())


@cache
def _rows(kind: TaskRows | PictureRows) -> tuple[BenchRow, ...]:
    return tuple(_task_rows(kind) if isinstance(kind, TaskRows) else _picture_rows(kind))


def _task_rows(kind: TaskRows) -> Iterator[BenchRow]:
    tokenizer = _tokenizer()
    names = list(TASKS)
    examples = [draw("heldout", kind.seed, number, names[number % len(names)]) for number in range(kind.count)]
    prompts = [
        tokenizer.encode_chat(ChatPrompt(tuple(example.messages())))
        if example.chat
        else tokenizer.encode([example.content.raw])[0]
        for example in examples
    ]
    answers = tokenizer.encode_plain([example.content.answer for example in examples])
    return (BenchRow(ids, len(answer) + 1) for ids, answer in zip(prompts, answers, strict=True))


def _picture_rows(kind: PictureRows) -> Iterator[BenchRow]:
    tokenizer, rng = _tokenizer(), np.random.default_rng(kind.seed)
    (image,) = tokenizer.encode_plain([_PICTURE])[0]
    ids = tokenizer.encode_chat(ChatPrompt(({"role": "user", "content": [{"type": "image"}]},)))
    before, after = ids[: ids.index(image)], ids[ids.index(image) + 1 :]
    known = np.setdiff1d(np.arange(_FIRST_PLAIN_ID, tokenizer.vocab_size), [image])
    lengths = rng.integers(*kind.length, endpoint=True, size=kind.instructions)
    instructions = [rng.choice(known, length).tolist() for length in lengths]
    for number in range(kind.count):
        start = [*before, *instructions[number % kind.instructions]]
        # A key outside the vocabulary is that of no other picture.
        prompt, keys = (
            [*start, *[token] * _PICTURE_TOKENS, *after] for token in (image, tokenizer.vocab_size + number)
        )
        new = int(rng.integers(*kind.output, endpoint=True))
        yield BenchRow(prompt, new, image=_draw_picture(rng), keys=keys)


def _draw_picture(rng: np.random.Generator) -> str:
    """Rectangles at random, as a PNG file in base64."""
    height, width = _PICTURE_SIZE
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = rng.integers(256, size=3)
    for _ in range(_RECTANGLES):
        (top, bottom), (left, right) = (np.sort(rng.integers(size + 1, size=2)) for size in _PICTURE_SIZE)
        pixels[top:bottom, left:right] = rng.integers(256, size=3)
    data = io.BytesIO()
    image_of(pixels.tobytes(), (width, height)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


BenchWorkload = Workload | DemoWorkload

_PICTURE: Final = "<|image|>"
_PICTURE_TOKENS: Final = 16
"""Tokens of any picture in the demonstration model's prompts."""
_PICTURE_SIZE: Final = (96, 128)
"""Height and width, in pixels."""
_RECTANGLES: Final = 8
_FIRST_PLAIN_ID: Final = 8
"""Smallest id of the demonstration model that is text wherever it is."""

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
        **{name: load_workload(_DEFINITIONS / f"{name}.toml") for name in ("demo", "pictures")},
        **GPU_WORKLOADS,
    }
    if name not in known:
        names = [*known, *ENGINELESS_WORKLOADS, _ALL]
        raise UsageError(
            f"unknown workload {name!r}{did_you_mean(name, names)}; use one of {', '.join(names)}, or a .toml file"
        )
    return known[name]


def load_workload(path: Path) -> BenchWorkload:
    """Read a definition file: a tree of random ids (`levels`, `output`), or rows of the demonstration model: of its
    tasks (`task_rows`), or with pictures (`pictures` and the keys of `PictureRows`).

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
    kind: TaskRows | PictureRows
    if "task_rows" in table.values:
        table.check_keys({"name", "description", "task_rows"}, {"seed"})
        kind = TaskRows(table.count("task_rows"), table.integer("seed", 0))
    elif "pictures" in table.values:
        table.check_keys({"name", "description", "pictures", "instructions", "instruction_tokens", "output"}, {"seed"})
        counts = table.count("pictures"), table.count("instructions")
        ranges = table.range("instruction_tokens"), table.range("output")
        kind = PictureRows(*counts, *ranges, table.integer("seed", 0))
    else:
        return _tree_workload(table)
    return DemoWorkload(table.text("name"), table.text("description"), kind)


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

    def count(self, key: str) -> int:
        """A whole number of at least 1."""
        found = self._integer(self.values[key], key)
        if found < 1:
            raise UsageError(f"{self.where}: `{key}` must be at least 1")
        return found

    def pair(self, key: str) -> tuple[int, int]:
        """The least and the most of a range."""
        value = self.values[key]
        if not isinstance(value, list) or len(value) != 2:
            raise UsageError(f"{self.where}: `{key}` must be [least, most], got {value!r}")
        return self._integer(value[0], key), self._integer(value[1], key)

    def range(self, key: str) -> tuple[int, int]:
        """A pair of at least 1 with the least first."""
        found = self.pair(key)
        check_range(found, f"{self.where}: `{key}`")
        return found

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
