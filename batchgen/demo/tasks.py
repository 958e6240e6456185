"""Tasks of the demonstration model: seeded examples in two disjoint splits, and the check of an answer.

`python -m batchgen.demo.tasks --rows 200` writes held-out rows for `batchgen run` to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

from batchgen.demo.questions import (
    TEMPLATES,
    Content,
    Split,
    arithmetic,
    classify,
    copy,
    extract,
    few_shot,
    question,
    sort,
    split_of,
    word_facts,
)

_TASKS: dict[str, tuple[Callable[[Random], Content], int]] = {
    "arithmetic": (arithmetic, 36),
    "sort": (sort, 16),
    "copy": (copy, 14),
    "extract": (extract, 12),
    "classify": (classify, 7),
    "question": (question, 18),
    "few_shot": (few_shot, 14),
    "word_facts": (word_facts, 6),
}
TASKS = {name: maker for name, (maker, _) in _TASKS.items()}
WEIGHTS = {name: weight for name, (_, weight) in _TASKS.items()}
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
    name, fixed = f"{example.task}-{number:04d}", {"temperature": 0}
    carried = {"task": example.task, "expected": example.content.answer}
    if example.chat and number % 3 == 2:
        body = {"model": "*", "messages": example.messages(), "max_tokens": 64, **fixed}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body, **carried}
    prompt = {"messages": example.messages()} if example.chat else {"text": example.content.raw}
    return {"id": name, **prompt, "sampling_params": {"max_new_tokens": 64, **fixed}, **carried}


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
