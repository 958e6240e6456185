"""Grammars as xgrammar prints them: left recursion, whether any text ends, new names, bounded numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

_Body = TypeVar("_Body")

_TOKEN = re.compile(
    r"""(?P<blank>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\]\*?)|(?P<count>\{[^}]*\})"""
    r"""|(?P<ahead>\(=)|(?P<call>[A-Z][A-Za-z]*\()|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>.)""",
    re.DOTALL,
)
"""Tokens of a grammar as printed by xgrammar."""
_RULE = re.compile(r"([A-Za-z_][\w.-]*)\s*::=")

MAX_DIGITS = 20
"""Most digits in a row in a number of JSON; every double and 64-bit integer has a form with fewer."""
_ANY_DIGITS = re.compile(
    r"""(?P<other>"(?:[^"\\]|\\.)*"|\[(?!0-9\]\*)(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<set>\[0-9\]\*)|(?P<digit>[A-Za-z_][\w.-]*)\{(?P<least>\d+), -1\}"""
)
"""What a number repeats without bound: a set of digits, or the rule of one digit; and texts, which may look so."""
_DIGIT_RULE = re.compile(r"^(\S+) ::= \(\(\[0-9\]\)\)$", re.MULTILINE)
_LIBRARY_RULE = re.compile(r"^(?:basic|xml)_.*\n?", re.MULTILINE)
"""Rules that xgrammar prints whether a schema needs them or not."""
_LIBRARY_DIGIT = "basic_number_digits"
"""The rule of one digit that no other digit precedes."""
_NUMBER = re.compile(r"\b(?:basic_(?:any|number|integer|array|object)|xml_(?:any|object))\b")


def left_recursive_rule(written: str, grammar: str) -> str | None:
    """The first left-recursive rule, for which xgrammar masks tokens that the grammar allows; None if there is none.

    Args:
        written: the grammar as given by the row; only rules that it names are considered, not generated ones.
        grammar: the same grammar as printed by xgrammar.
    """
    rules = _parse_rules(grammar)
    empty = grown(rules, partial(_holds, text=False))
    first_rules = {name: set(_first_rules(body, empty)) for name, body in rules.items()}
    named = set(_RULE.findall(written))
    return next((name for name in rules if name in named and reaches_itself(name, first_rules.__getitem__)), None)


def can_end(grammar: str) -> bool:
    """Whether a grammar, as printed by xgrammar, has a finite text: not every derivation needs the same rule again."""
    return "root" in grown(_parse_rules(grammar), partial(_holds, text=True))


def grown(rules: Mapping[str, _Body], holds: Callable[[_Body, set[str]], bool]) -> set[str]:
    """Names of the rules of which something holds, given those of which it is known already."""
    known: set[str] = set()
    while more := {name for name, body in rules.items() if name not in known and holds(body, known)}:
        known |= more
    return known


def reaches_itself(name: str, following: Callable[[str], Iterable[str]]) -> bool:
    """Whether one comes back to a rule by those that follow each; a rule may follow others that are not known."""
    seen: set[str] = set()
    waiting = list(following(name))
    while waiting:
        rule = waiting.pop()
        if rule == name:
            return True
        if rule not in seen:
            seen.add(rule)
            waiting += following(rule)
    return False


def with_prefix(grammar: str, prefix: str) -> str:
    """A grammar as printed by xgrammar, with `prefix` for `root` in the names of its rules."""
    names = {name for name, sign, _ in (line.partition(" ::= ") for line in grammar.splitlines()) if sign}

    def renamed(part: re.Match[str]) -> str:
        word = part.group()
        return prefix + word.removeprefix("root") if part.lastgroup == "name" and word in names else word

    return _TOKEN.sub(renamed, grammar)


def with_bounded_digits(grammar: str) -> str:
    """The grammar of a schema without patterns, as printed by xgrammar, with at most `MAX_DIGITS` digits in a row.

    Unchanged if no number in it has more.
    """
    digits = set(_DIGIT_RULE.findall(grammar))

    def bounded(part: re.Match[str]) -> str:
        name, least = part["digit"], part["least"]
        if part["set"]:
            return "more_digits"
        if name not in digits:
            return part.group()
        if least == "1":
            return f"{name} {'more_digits' if name == _LIBRARY_DIGIT else 'other_digits'}"
        return f"{name}{{{least}, {max(MAX_DIGITS - 1, int(least))}}}"

    used = _LIBRARY_RULE.sub("", grammar)
    if not _NUMBER.search(used) and _ANY_DIGITS.sub(bounded, used) == used:
        return grammar
    # Rules that all numbers share, since a compiled grammar has a mask for each state of each rule.
    more = f'more_digits ::= "" | [0-9] other_digits\nother_digits ::= [0-9]{{0,{MAX_DIGITS - 2}}}\n'
    return _ANY_DIGITS.sub(bounded, grammar) + more


_Element = tuple[str, Any, bool]
"""(`rule`, `group` or `text`; its name or choices; whether it is optional)"""


class _RuleParser:
    """Parser of the right-hand side of one rule."""

    def __init__(self, body: str) -> None:
        self._tokens = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(body) if m.lastgroup != "blank"]
        self._position = 0

    def choices(self) -> list[list[_Element]]:
        choices: list[list[_Element]] = [[]]
        while self._position < len(self._tokens):
            kind, word = self._tokens[self._position]
            self._position += 1
            if word == ")":
                break
            if word == "|":
                choices.append([])
            elif kind == "ahead":
                self.choices()
            elif kind == "call":
                self._skip()
                choices[-1].append(("text", None, False))
            elif word == "(":
                inner = self.choices()
                choices[-1].append(("group", inner, self._optional()))
            elif kind == "name":
                choices[-1].append(("rule", word, self._optional()))
            else:
                nothing = word in ('""',) or word.endswith("]*")
                choices[-1].append(("text", None, nothing or self._optional()))
        return choices

    def _optional(self) -> bool:
        """Whether a following count or sign makes the element optional; it is consumed."""
        if self._position < len(self._tokens):
            kind, word = self._tokens[self._position]
            if kind == "count" or word in ("*", "?", "+"):
                self._position += 1
                return word in ("*", "?") or bool(re.match(r"\{\s*0\s*[,}]", word))
        return False

    def _skip(self) -> None:
        """Skip the arguments of a macro such as TagDispatch, which always reads text before another rule."""
        depth = 1
        while depth and self._position < len(self._tokens):
            kind, word = self._tokens[self._position]
            depth += (word == "(" or kind in ("call", "ahead")) - (word == ")")
            self._position += 1


def _holds(choices: list[list[_Element]], known: set[str], *, text: bool) -> bool:
    """Whether a choice has only elements that are optional, of rules in `known`, or `text`, where that may be."""
    return any(all(_element_holds(element, known, text=text) for element in sequence) for sequence in choices)


def _element_holds(element: _Element, known: set[str], *, text: bool) -> bool:
    kind, value, optional = element
    if optional or kind == "text":
        return optional or text
    return value in known if kind == "rule" else _holds(value, known, text=text)


def _first_rules(choices: list[list[_Element]], empty: set[str]) -> Iterator[str]:
    """Rules that the text of these choices may begin with."""
    for sequence in choices:
        for element in sequence:
            kind, value, _ = element
            if kind == "rule":
                yield value
            elif kind == "group":
                yield from _first_rules(value, empty)
            if not _element_holds(element, empty, text=False):
                break


def _parse_rules(grammar: str) -> dict[str, list[list[_Element]]]:
    """Rule name -> its choices."""
    rules: dict[str, list[list[_Element]]] = {}
    for line in grammar.splitlines():
        name, sign, body = line.partition(" ::= ")
        if sign:
            rules[name] = _RuleParser(body).choices()
    return rules
