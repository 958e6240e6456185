"""Names of options of other systems, and what to write here instead: data for hints, notes and a page.

A name that is also a field here needs no entry in `ANSWERS`: the table of fields says what happens with it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

Verdict = Literal["use", "refuse", "idle"]
"""use: a field or an option here does the same. refuse: nothing does. idle: it does not change a result."""

_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def words(text: str) -> tuple[str, ...]:
    """The words of a text, without repetitions."""
    return tuple(dict.fromkeys(text.split()))


FLAGS_OF_OTHERS: dict[str, str] = _DATA["flags"]
"""Flag of vLLM or SGLang -> the flag here that means the same."""
ARGUMENTS_OF_OTHERS: dict[str, str] = _DATA["arguments"]
"""Argument of a Python function of another system -> the argument here that means the same."""
MISSING_ARGUMENTS: dict[str, str] = {
    name: text for text, names in _DATA["missing_arguments"].items() for name in words(names)
}
"""Argument of such a function -> what to do here, where nothing means the same."""
NAMES: dict[str, tuple[str, ...]] = {system: words(names) for system, names in _DATA["names"].items()}
"""System -> every name of an option or prompt that its API reads, those of its sampling parameters included."""
CONTAINERS = frozenset(words(f"{_DATA['containers']} {_DATA['use']['`sampling_params`']}"))
"""Keys whose value, if it is an object, may hold options."""
ORDINARY = frozenset(words(_DATA["ordinary"]))
"""Names that columns of ordinary tables have, too: at the top level of a row they mean nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do here instead of an option of another system."""

    verdict: Verdict
    text: str
    """For `use` what to use, else the reason with its remedy. Fields are in backticks, options begin with --."""

    @property
    def advice(self) -> str:
        """The text as part of a sentence."""
        return f"use {self.text}" if self.verdict == "use" else self.text


ANSWERS: dict[str, Answer] = {
    name: Answer(verdict, text)
    for verdict in get_args(Verdict)
    for text, names in _DATA[verdict].items()
    for name in words(names)
}
"""Name, in snake case, -> its answer."""


_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def snake_case(name: str) -> str:
    """A name as it would be written here: `maxTokens` and `max-tokens` are `max_tokens`."""
    return _HUMP.sub("_", name).replace("-", "_").lower()


@lru_cache(maxsize=1024)
def systems_of(name: str) -> list[str]:
    """The systems whose API has this name, given in snake case."""
    return [system for system, names in NAMES.items() if name in map(snake_case, names)]


_LONG = 8
FOREIGN = frozenset(
    name
    for name, answer in ANSWERS.items()
    if len(name) > _LONG and "_" in name and answer.verdict != "idle" and name not in ORDINARY
)
"""Options of other systems that a key may be a misspelling of: no short name or single word, close to many columns."""


def answer_to(name: str) -> str:
    """What an option of another system is here, as part of a sentence."""
    answer, systems = ANSWERS[name], systems_of(name)
    whose = " and ".join(systems[:2]) or "other systems"
    return f"an option of {whose}: {answer.advice}"


def meaning_of(key: str, known: Collection[str]) -> str | None:
    """What an unknown key means that is a name of `known` in another spelling, or an option of another system."""
    name = snake_case(key[:80])
    if name in known:
        return f"did you mean `{name}`?"
    return answer_to(name) if name in ANSWERS else None


def close_meaning(key: str, known: Collection[str]) -> str | None:
    """What an unknown key means that is a misspelt name of `known`, or option of another system."""
    closest = difflib.get_close_matches(key[:80], [*known, *FOREIGN.difference(known)], n=1, cutoff=0.7)
    return asked(closest[0], known) if closest else None


def asked(name: str, known: Collection[str]) -> str:
    """The question whether `name` is meant: one of `known`, or else an option of another system."""
    return f"did you mean `{name}`?" if name in known else f"did you mean `{name}`, {answer_to(name)}"
