"""The demonstration model's own tasks as a workload: real text, real lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from batchgen.demo import model_path
from batchgen.demo.tasks import TASKS, draw
from batchgen.errors import UsageError
from batchgen.job.bench.workloads import AdapterSet, BenchRow
from batchgen.prompts import ChatPrompt
from batchgen.text.tokenizer import Tokenizer

__all__ = ["DemoWorkload"]


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Held-out rows of the tasks in turn. Every row generates as many tokens as its answer and an end take, whatever
    it says: what the model would generate by itself, and the same for every engine.

    Raises:
        UsageError: there are no rows.
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
        """Positions of the longest row."""
        return max(len(row.ids) + row.max_new for row in _rows(self.task_rows, self.seed))

    def rows(self, vocab_size: int) -> list[BenchRow]:
        """The rows, in the demonstration model's ids, of which `vocab_size` must be the number.

        Raises:
            UsageError: it is another model's.
        """
        known = _tokenizer().vocab_size
        if vocab_size != known:
            raise UsageError(
                f"workload {self.name} is text in the demonstration model's {known} tokens, the model has "
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
