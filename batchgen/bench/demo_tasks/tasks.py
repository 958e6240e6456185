"""Tasks of the demonstration model: seeded examples in two disjoint splits, and the check of an answer.

`python -m batchgen.bench.demo_tasks.tasks --rows 200` writes held-out rows for `batchgen run` to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

from batchgen.bench.demo_tasks.content import HELDOUT_ONE_IN, TEMPLATES, Content, Split, split_of
from batchgen.bench.demo_tasks.makers import arithmetic, copy, few_shot, sort, word_facts
from batchgen.bench.demo_tasks.passages import classify, extract, question

__all__ = [
    "HELDOUT_ONE_IN",
    "TASKS",
    "WEIGHTS",
    "Content",
    "Example",
    "Split",
    "draw",
    "is_correct",
    "rows",
    "split_of",
]

TASKS: dict[str, Callable[[Random], Content]] = {
    "arithmetic": arithmetic,
    "sort": sort,
    "copy": copy,
    "extract": extract,
    "classify": classify,
    "question": question,
    "few_shot": few_shot,
    "word_facts": word_facts,
}

WEIGHTS: dict[str, int] = {
    "arithmetic": 36,
    "sort": 16,
    "copy": 14,
    "extract": 12,
    "classify": 7,
    "question": 18,
    "few_shot": 14,
    "word_facts": 6,
}
"""Task -> relative number of examples."""

RAW_SHARE = 0.2
"""Share of examples as plain text instead of a chat."""
SYSTEM_SHARE = 0.12
"""Share of chats with a system message."""
LONG_SYSTEM_SHARE = 0.01
"""Share of chats whose system message is a long list of rules."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question in the form in which the model gets it.

    Attributes:
        task: name of the task, a key of `TASKS`.
        content: the question and its answer.
        chat: whether it is a chat with one user turn; otherwise plain text to continue.
        system: system message of the chat, if any.
    """

    task: str
    content: Content
    chat: bool
    system: str | None

    def messages(self) -> list[dict[str, str]]:
        """Messages of the chat, without the answer."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, {"role": "user", "content": self.content.prompt}]


def system_message(rng: Random) -> str | None:
    """A system message: none, a short one, or, rarely, a long list of rules (a long shared prefix)."""
    if rng.random() >= SYSTEM_SHARE:
        return None
    message = rng.choice(TEMPLATES["systems"])
    if rng.random() >= LONG_SYSTEM_SHARE / SYSTEM_SHARE:
        return message
    rules = [rng.choice(TEMPLATES["rules"]) for _ in range(rng.randint(4, 50))]
    return " ".join([message, *rules])


def draw(split: Split, seed: int, index: int, task: str | None = None, weights: Mapping[str, int] = WEIGHTS) -> Example:
    """Example `index` of the infinite sequence of a split, a seed and a task.

    Examples are independent of each other.

    Args:
        split: the split.
        seed: the seed.
        index: position in the sequence.
        task: a key of `TASKS`; None picks one at random by `weights`.
        weights: relative number of examples of each task.
    """
    rng = Random(f"{split}/{seed}/{index}/{task}")
    name = task if task is not None else rng.choices(list(weights), list(weights.values()))[0]
    content = TASKS[name](rng)
    while split_of(content.key) != split:
        content = TASKS[name](rng)
    chat = rng.random() >= RAW_SHARE
    return Example(task=name, content=content, chat=chat, system=system_message(rng) if chat else None)


def is_correct(example: Example, output: str) -> bool:
    """Whether the generated text equals the answer, ignoring surrounding white space."""
    return output.strip() == example.content.answer


def row(example: Example, number: int) -> dict[str, Any]:
    """An input row for `batchgen run`: an OpenAI batch line for every third chat, else `messages`, or `text`.

    batchgen does not know the fields `expected` and `task` and copies them to the output.
    """
    name = f"{example.task}-{number:04d}"
    carried = {"task": example.task, "expected": example.content.answer}
    if not example.chat:
        sampling = {"max_new_tokens": 64, "temperature": 0}
        return {"id": name, "text": example.content.raw, "sampling_params": sampling, **carried}
    if number % 3 == 2:
        body = {"model": "*", "messages": example.messages(), "max_tokens": 64, "temperature": 0}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body, **carried}
    sampling = {"max_new_tokens": 64, "temperature": 0}
    return {"id": name, "messages": example.messages(), "sampling_params": sampling, **carried}


def rows(split: Split, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The first `count` rows of a split; tasks alternate."""
    names = list(TASKS)
    for number in range(count):
        yield row(draw(split, seed, number, names[number % len(names)]), number)


def main(arguments: list[str] | None = None) -> None:
    """Write input rows of a split as JSON lines to standard output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--split", choices=get_args(Split), default="heldout")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for line in rows(options.split, options.rows, options.seed):
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
