"""Workloads of TOML definition files: trees of random prompts, and rows of the demonstration model.

Those of the folder `definitions/` have names.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from batchgen.bench.config import ENGINELESS_WORKLOADS
from batchgen.config.definitions import check_keys, did_you_mean, read_definition
from batchgen.demo import model_path
from batchgen.demo.tasks import TASKS, draw
from batchgen.errors import RowError, UsageError
from batchgen.media.images import image_of
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from batchgen.text.tokens.tokenizer import Tokenizer

RowsAt = Literal["leaves", "nodes"]
"""Nodes of the tree that are rows: the leaves, or all, as in the turns of a conversation."""

_FIRST_ID: Final = 3
"""Smallest id of random prompts; many vocabularies have special tokens below it."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: the number of children of every node above, and the (least, most) ids of each child."""

    children: int
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Random LoRA adapters, assigned to the rows in rotation."""

    count: int
    rank: int = 8

    def name(self, number: int) -> str:
        """`lora_path` of adapter `number`."""
        return f"rank-{self.rank}-{number}"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One prompt and its number of new tokens; generation ignores stops."""

    ids: list[int]
    max_new: int
    samples: int = 1
    """Number of samples; several are generated at temperature 1, because greedy ones would be equal."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of batchgen's input rows. Only engines that support them run such rows."""
    image: str = ""
    """A picture file in base64, whose tokens are among `ids`; empty for none."""
    keys: Sequence[int] = ()
    """Equal where rows have the same token or the same part of the same picture; `ids` if empty."""


def plain(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Copies of the rows without `fields`."""
    return [replace(row, fields={}) for row in rows]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload whose prompts are the leaves, or all nodes, of a tree of random segments.

    Raises:
        UsageError: special rows have several samples.
    """

    name: str
    description: str
    levels: tuple[Level, ...]
    output: tuple[int, int]
    """Least and most new tokens of a row, uniformly distributed."""
    seed: int = 0
    samples: int = 1
    """Number of samples of each prompt."""
    rows_at: RowsAt = "leaves"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """`BenchRow.fields` of special rows."""
    every: int = 1
    """One of this many rows has `fields`."""
    adapters: AdapterSet | None = None
    pictures: ClassVar[bool] = False
    """Whether rows have pictures."""

    def __post_init__(self) -> None:
        if self.samples > 1 and self.special:
            raise UsageError(
                f"workload {self.name}: `samples` above 1 cannot be combined with `fields` or `adapters`, because the "
                "gate cannot compare random samples; remove one of them"
            )

    @property
    def special(self) -> bool:
        """Whether rows have fields or adapters."""
        return bool(self.fields) or self.adapters is not None

    @property
    def longest(self) -> int:
        """Number of positions of the longest possible row."""
        return sum(level.tokens[1] for level in self.levels) + self.output[1]

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows in random order; deterministic for a definition and vocabulary size.

        Raises:
            UsageError: the vocabulary is too small.
        """
        if vocab_size <= _FIRST_ID:
            raise UsageError(f"workload {self.name} needs a vocabulary of more than {_FIRST_ID} ids, got {vocab_size}")
        rng = np.random.default_rng(self.seed)
        above: list[list[int]] = [[]]
        prompts: list[list[int]] = []
        for number, level in enumerate(self.levels, start=1):
            above = [
                prefix
                + rng.integers(_FIRST_ID, vocab_size, size=int(rng.integers(*level.tokens, endpoint=True))).tolist()
                for prefix in above
                for _ in range(level.children)
            ]
            if self.rows_at == "nodes" or number == len(self.levels):
                prompts += above
        lengths = rng.integers(*self.output, endpoint=True, size=len(prompts)).tolist()
        order = rng.permutation(len(prompts)).tolist()
        return [BenchRow(prompts[i], lengths[i], self.samples, self._fields(at)) for at, i in enumerate(order)]

    def _fields(self, at: int) -> Mapping[str, Any]:
        """Fields of row `at` in the workload's order."""
        fields = dict(self.fields) if at % self.every == 0 else {}
        return fields if self.adapters is None else fields | {"lora_path": self.adapters.name(at % self.adapters.count)}


_PICTURE: Final = "<|image|>"
_PICTURE_TOKENS: Final = 16
"""Tokens of any picture in the model's prompts."""
_PICTURE_SIZE: Final = (96, 128)
"""Height and width, in pixels."""
_RECTANGLES: Final = 8
_FIRST_PLAIN_ID: Final = 8
"""Smallest id that is text wherever it is."""


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Rows of the demonstration model. Each generates a fixed number of tokens, the same for every engine.

    Rows of tasks, which alternate, are as long as their expected answers and one token more.
    """

    name: str
    description: str
    count: int
    seed: int = 0
    instructions: int = 0
    """Number of instructions, which are random ids: each row is a distinct picture after one of them. 0: rows of tasks.
    """
    length: tuple[int, int] = (1, 1)
    """The least and the most tokens of an instruction."""
    output: tuple[int, int] = (1, 1)
    """The least and the most new tokens of a row with a picture."""
    fields: ClassVar[Mapping[str, Any]] = {}
    adapters: ClassVar[AdapterSet | None] = None
    samples: ClassVar[int] = 1
    special: ClassVar[bool] = False

    @property
    def pictures(self) -> bool:
        """Whether rows have pictures."""
        return self.instructions > 0

    @property
    def longest(self) -> int:
        """Number of positions of the longest row."""
        return max(len(row.ids) + row.max_new for row in _rows(self))

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
        return list(_rows(self))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path())


@cache
def _rows(kind: DemoWorkload) -> tuple[BenchRow, ...]:
    return tuple(_picture_rows(kind) if kind.pictures else _task_rows(kind))


def _task_rows(kind: DemoWorkload) -> Iterator[BenchRow]:
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


def _picture_rows(kind: DemoWorkload) -> Iterator[BenchRow]:
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
    chosen: list[BenchWorkload] = []
    for name in names or (("demo",) if demo else WORKLOADS):
        chosen += (WORKLOADS | MORE_WORKLOADS).values() if name == _ALL else [find_workload(name)]
    for number, workload in enumerate(chosen):
        if workload.name in {other.name for other in chosen[:number]}:
            raise UsageError(f"workload {workload.name} is given more than once")
    return chosen


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
        **HYBRID_WORKLOADS,
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
    tasks (`task_rows`), or with pictures (`pictures`, `instructions`, `instruction_tokens`, `output`).

    Raises:
        UsageError: the file cannot be read, or a key is missing, unknown or wrong.
    """
    table = read_definition(path, "", "the workload ")
    needed, optional = _TREE
    if "task_rows" in table:
        needed, optional = {"task_rows": _count}, {}
    elif "pictures" in table:
        needed, optional = _PICTURES, {}
    about: dict[str, _Reader] = {"name": _text, "description": _text}
    values = _read(table, str(path), about | needed, {"seed": _whole} | optional)
    if "levels" in values:
        return Workload(**values)
    return DemoWorkload(**{_DEMO_NAMES.get(key, key): value for key, value in values.items()})


_Reader = Callable[[Any, str], Any]
"""Checks a value, with a message that begins with the value's name, and returns it as a definition has it.

Raises:
    UsageError: the value is wrong.
"""


def _read(table: object, where: str, needed: Mapping[str, _Reader], optional: Mapping[str, _Reader]) -> dict[str, Any]:
    """The values of a table that has all `needed` keys, and no other but `optional` ones."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    readers = {**needed, **optional}
    check_keys(table, sorted(readers), where)
    if missing := needed.keys() - table:
        raise UsageError(f"{where}: `{min(missing)}` is missing")
    return {key: readers[key](value, f"{where}: `{key}`") for key, value in table.items()}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a text")
    return value


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    return value


def _count(value: Any, name: str) -> int:
    if _whole(value, name) < 1:
        raise UsageError(f"{name} must be at least 1")
    return int(value)


def _range(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{name} must be [least, most], got {value!r}")
    least, most = _whole(value[0], name), _whole(value[1], name)
    if not 1 <= least <= most:
        raise UsageError(f"{name} must be [least, most] with 1 <= least <= most, got {value}")
    return least, most


def _levels(value: Any, name: str) -> tuple[Level, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(level, dict) for level in value):
        raise UsageError(f"{name} must be tables, as in [[levels]]")
    readers: dict[str, _Reader] = {"children": _count, "tokens": _range}
    return tuple(Level(**_read(level, f"{name[:-1]}[{at}]`", readers, {})) for at, level in enumerate(value))


def _rows_at(value: Any, name: str) -> Any:
    if value not in get_args(RowsAt):
        raise UsageError(f"{name} must be one of {', '.join(get_args(RowsAt))}, got {value!r}")
    return value


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Row fields of special rows, limited to those that the gate can check."""
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a table")
    if unknown := sorted(value.keys() - set(_CHECKABLE_FIELDS)):
        hint = did_you_mean(unknown[0], _CHECKABLE_FIELDS)
        raise UsageError(
            f"{name}: the gate cannot check {unknown[0]!r}{hint}; it can check {', '.join(_CHECKABLE_FIELDS)}"
        )
    try:
        params = parse_row({"input_ids": [0], **value}, 0, RowDefaults()).params
    except RowError as error:
        raise UsageError(f"{name}: {error.info.message}") from None
    states = params.return_hidden_states
    if states is None:
        return value
    if states.tokens != "output" or states.pool != "none":
        raise UsageError(
            f'{name}: `return_hidden_states` must have tokens = "output" and no pool, so that the gate can count states'
        )
    return {**value, "return_hidden_states": {"layers": list(states.layers), "tokens": "output"}}


def _adapters(value: Any, name: str) -> AdapterSet:
    return AdapterSet(**_read(value, name, {"count": _count}, {"rank": _count}))


_TREE: Final[tuple[dict[str, _Reader], dict[str, _Reader]]] = (
    {"levels": _levels, "output": _range},
    {"samples": _count, "rows_at": _rows_at, "fields": _fields, "every": _count, "adapters": _adapters},
)
"""Keys of a tree that are needed, and those that are not."""
_PICTURES: Final[dict[str, _Reader]] = {
    "pictures": _count,
    "instructions": _count,
    "instruction_tokens": _range,
    "output": _range,
}
_DEMO_NAMES: Final = {"task_rows": "count", "pictures": "count", "instruction_tokens": "length"}
"""Key -> field of `DemoWorkload`, where they differ."""


def _named(*names: str, folder: str = "") -> dict[str, Workload]:
    """Named workloads of random ids, in a folder of the definitions."""
    loaded = {name: load_workload(_DEFINITIONS / folder / f"{name}.toml") for name in names}
    return {name: workload for name, workload in loaded.items() if isinstance(workload, Workload)}


WORKLOADS = _named("unique", "shared-prefix", "few-shot-tree", "mixed-lengths")
"""Default workloads, in this order."""
MORE_WORKLOADS = _named("multi-turn", "n-samples", "json-constrained", "logprobs", "hidden-states", "many-loras")
"""Workloads of other trees and of special rows; they run if named, or with `all`."""
HYBRID_WORKLOADS = _named("hybrid-prefix", "hybrid-unshared", folder="hybrid")
"""Workloads for models with recurrent layers; they run only if named."""
GPU_WORKLOADS = _named("w-nano", "w-prefix", "w-unshared", "w-tree", folder="gpu")
"""Workloads sized for a GPU; they run only if named, because a CPU takes hours."""
