"""A small model's shape, a small workload, engines with fixed outputs, and engines in this process."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from batchgen.bench.process import BenchEngine, EngineSource, Generated, LoadSpec
from batchgen.bench.shapes import Shape
from batchgen.bench.workloads import BenchRow

TEXT = Shape(2, 32, 4, 2, 8, 48, 400, context=128)
TOY = """\
name = "toy"
description = "two prompts after one prefix"
output = [2, 3]

[[levels]]
children = 1
tokens = [8, 8]

[[levels]]
children = 2
tokens = [2, 4]
"""


@dataclass
class Stub:
    """An engine with fixed outputs, other ones for rows with fields."""

    answers: list[list[int]]
    special: list[list[int]] | None = None
    counted: dict[str, int] = field(default_factory=dict)
    """Counts of rows with fields."""
    name: str = "stub"
    version: str = "0"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    settings: Sequence[Mapping[str, int]] = ({},)

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        if self.special is not None and any(row.fields for row in rows):
            return Generated(self.special, 1.0, 1.0, self.counted)
        return Generated(self.answers, 1.0, 1.0)


class InProcess:
    """An engine loaded in this process, which saves the imports of a separate one."""

    def __init__(self, source: EngineSource, spec: LoadSpec) -> None:
        script = importlib.import_module(f"batchgen.bench.engines.{source.script}")
        self.engine: Any = script.Engine({"engine": source.name, **asdict(spec)})
        self.name, self.version, self.dtype = source.name, self.engine.version, self.engine.dtype
        self.device, self.threads, self.settings = self.engine.device, self.engine.threads, self.engine.settings

    def generate(self, rows: Sequence[BenchRow], setting: Mapping[str, int]) -> Generated:
        sent = [asdict(row) for row in rows]
        self.engine.prepare(sent, dict(setting))
        outputs, counted = self.engine.generate(sent, dict(setting))
        return Generated(outputs, 1.0, 1.0, counted)


def in_process(name: str, model: Path, **options: object) -> InProcess:
    """An engine in float32 with one thread."""
    return InProcess(EngineSource(name), LoadSpec(str(model), "float32", "cpu", 1, options))


def starting(
    make: Callable[[EngineSource, LoadSpec], BenchEngine] = InProcess,
) -> Callable[[EngineSource, LoadSpec], AbstractContextManager[BenchEngine]]:
    """The `start` of `run_bench` that makes engines by `make`."""

    @contextmanager
    def start(source: EngineSource, spec: LoadSpec) -> Iterator[BenchEngine]:
        yield make(source, spec)

    return start


def silent_console(width: int = 160, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal or None, color_system=None)


def console_text(console: Console) -> str:
    """Text written to a `silent_console`."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text
