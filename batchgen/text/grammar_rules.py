"""What the rules of a grammar say of each other: left recursion, and whether any text ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["can_end", "left_recursive_rule"]

_TOKEN = re.compile(
    r"""(?P<blank>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\]\*?)|(?P<count>\{[^}]*\})"""
    r"""|(?P<ahead>\(=)|(?P<call>[A-Z][A-Za-z]*\()|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>.)""",
    re.DOTALL,
)
"""Words of a grammar as xgrammar prints it."""
_RULE = re.compile(r"([A-Za-z_][\w.-]*)\s*::=")


def left_recursive_rule(written: str, grammar: str) -> str | None:
    """The first rule that can come to itself before any character is read; xgrammar then bars tokens that it allows.

    Args:
        written: the grammar as the row gives it: only the rules it names count, not those made of its repeats.
        grammar: the same as xgrammar prints it.
    """
    rules = _read(grammar)
    empty: set[str] = set()
    while grown := {name for name, body in rules.items() if name not in empty and _can_be_empty(body, empty)}:
        empty |= grown
    begins = {name: set(_first_rules(body, empty)) for name, body in rules.items()}
    named = set(_RULE.findall(written))
    return next((name for name in rules if name in named and _reaches(name, begins)), None)


def can_end(grammar: str) -> bool:
    """Whether a grammar, as xgrammar prints it, has any text that ends: one where no rule needs itself for ever."""
    rules = _read(grammar)
    ending: set[str] = set()
    while grown := {name for name, body in rules.items() if name not in ending and _ends(body, ending)}:
        ending |= grown
    return "root" in ending


_Element = tuple[str, Any, bool]
"""(`rule`, `group` or `text`; the name or the choices; whether it can be left out)"""


class _Reader:
    """Reads the right side of one rule."""

    def __init__(self, body: str) -> None:
        self._words = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(body) if m.lastgroup != "blank"]
        self._at = 0

    def choices(self) -> list[list[_Element]]:
        found: list[list[_Element]] = [[]]
        while self._at < len(self._words):
            kind, word = self._words[self._at]
            self._at += 1
            if word == ")":
                break
            if word == "|":
                found.append([])
            elif kind == "ahead":
                self.choices()
            elif kind == "call":
                self._skip()
                found[-1].append(("text", None, False))
            elif word == "(":
                inner = self.choices()
                found[-1].append(("group", inner, self._optional()))
            elif kind == "name":
                found[-1].append(("rule", word, self._optional()))
            else:
                nothing = word in ('""',) or word.endswith("]*")
                found[-1].append(("text", None, nothing or self._optional()))
        return found

    def _optional(self) -> bool:
        """Whether a count or sign that follows lets the element be left out."""
        if self._at < len(self._words):
            kind, word = self._words[self._at]
            if kind == "count" or word in ("*", "?", "+"):
                self._at += 1
                return word in ("*", "?") or bool(re.match(r"\{\s*0\s*[,}]", word))
        return False

    def _skip(self) -> None:
        """Past the arguments of a macro such as TagDispatch, which always reads text before another rule."""
        depth = 1
        while depth and self._at < len(self._words):
            kind, word = self._words[self._at]
            depth += (word == "(" or kind in ("call", "ahead")) - (word == ")")
            self._at += 1


def _can_be_empty(choices: list[list[_Element]], empty: set[str]) -> bool:
    return any(all(_skippable(element, empty) for element in sequence) for sequence in choices)


def _skippable(element: _Element, empty: set[str]) -> bool:
    kind, value, optional = element
    if optional:
        return True
    return value in empty if kind == "rule" else kind == "group" and _can_be_empty(value, empty)


def _first_rules(choices: list[list[_Element]], empty: set[str]) -> Iterator[str]:
    """Rules that the text may begin with."""
    for sequence in choices:
        for element in sequence:
            kind, value, _ = element
            if kind == "rule":
                yield value
            elif kind == "group":
                yield from _first_rules(value, empty)
            if not _skippable(element, empty):
                break


def _reaches(name: str, begins: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    waiting = list(begins[name])
    while waiting:
        rule = waiting.pop()
        if rule == name:
            return True
        if rule not in seen:
            seen.add(rule)
            waiting.extend(begins.get(rule, ()))
    return False


def _ends(choices: list[list[_Element]], ending: set[str]) -> bool:
    return any(all(_element_ends(element, ending) for element in sequence) for sequence in choices)


def _element_ends(element: _Element, ending: set[str]) -> bool:
    kind, value, optional = element
    if optional or kind == "text":
        return True
    return value in ending if kind == "rule" else _ends(value, ending)


def _read(grammar: str) -> dict[str, list[list[_Element]]]:
    """Rules by name."""
    rules: dict[str, list[list[_Element]]] = {}
    for line in grammar.splitlines():
        name, sign, body = line.partition(" ::= ")
        if sign:
            rules[name] = _Reader(body).choices()
    return rules
