"""A budget for rendering chat templates: loops are counted, and texts and lists are measured before they are made.

A template may loop over anything that a row gives it, in loops within loops, and make long texts of short ones. So the
template's code counts what it does: each pass of a loop and each call is a step, and so are the elements of the lists
that it makes; each text that it makes or writes counts by its characters. What would make a text from numbers (padding,
repetition, formats) is measured first. Beyond the budget `OverBudget` is raised.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

MAX_STEPS: Final = 4_000_000
"""Most steps of all renderings of one row's conversation."""
MAX_CHARACTERS: Final = 1 << 26
"""Most characters of the texts that they make on the way, and of the result."""
_STEP_ELEMENTS: Final = 8
"""Elements of a list that count as one step."""
_STEP_CHARACTERS: Final = 1024
"""Characters of a text that count as one step when it is read."""
_MAX_DIGITS: Final = 6
"""Most digits of a number in a format."""
_MAX_BITS: Final = 4096
_MAX_POWER: Final = 1024
_MAX_INDENT: Final = 64
_CONVERSION: Final = re.compile(r"[-+ #0]*([0-9*]*(?:\.[0-9*]*)?)[hlL]?.?", re.DOTALL)
"""What follows `%` and a name in brackets; the group is the width and the precision."""
_SMALL: Final = {
    "abs", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last", "length", "lower", "map",
    "reject", "rejectattr", "round", "safe", "select", "selectattr", "trim", "upper",
}  # fmt: skip
"""Filters that make nothing that is longer than what they are given, or only when it is asked for."""
_TEXT, _TICK, _MADE = "batchgen_text", "batchgen_tick", "batchgen_made"


class OverBudget(BaseException):
    """A template does more than its budget allows; no `Exception`, so that it is not taken for one that it raises."""


class Budget:
    """What is left for the renderings of one row."""

    __slots__ = ("characters", "steps")

    def __init__(self) -> None:
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS

    def renew(self) -> None:
        """Begin the next row."""
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS

    def step(self, steps: int = 1, characters: int = 0) -> None:
        """Count steps, and characters that are made or written.

        Raises:
            OverBudget: there are no more of them.
        """
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise OverBudget(f"the chat template takes more than {MAX_STEPS} steps for this conversation; shorten it")
        if self.characters < 0:
            size = f"{MAX_CHARACTERS} characters"
            raise OverBudget(f"the chat template makes more than {size} of this conversation; shorten it")

    def number(self, value: Any) -> None:
        """Check a number from which a text may be made: a width or a count."""
        if isinstance(value, int) and abs(value) > self.characters:
            self.step(0, abs(value))

    def made(self, value: Any, *, copied: bool = True) -> Any:
        """Count a value that was made, with everything in it; returns it.

        Args:
            value: the value.
            copied: whether the texts in a list or an object are new or are written; else it only refers to them.
        """
        if type(value) is str:
            self.step(1, len(value))
        elif isinstance(value, int):
            self.step()
            if value.bit_length() > _MAX_BITS:
                raise OverBudget(f"the chat template computes a number of more than {_MAX_BITS} bits")
        elif not isinstance(value, float) and value is not None:
            for size, characters in _sizes(value):
                self.step(1 + size // _STEP_ELEMENTS, characters if copied else 0)
        return value

    def seen(self, value: Any) -> None:
        """Count a value that is given to a function: a long one takes time each time."""
        if type(value) is str:
            self.step(1 + len(value) // _STEP_CHARACTERS)
        elif isinstance(value, list | tuple | dict):
            self.step(1 + len(value) // _STEP_ELEMENTS)


def _sizes(value: Any) -> Iterator[tuple[int, int]]:
    """(elements, characters) of a value and of all values in it, each as often as it is written."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield 0, len(each)
        elif isinstance(each, dict):
            yield len(each), sum(len(key) for key in each if isinstance(key, str))
            waiting.extend(each.values())
        elif isinstance(each, list | tuple):
            yield len(each), 0
            waiting.extend(each)
        elif type(each).__name__.endswith("Namespace"):
            yield 1, 0
            waiting.append(each._Namespace__attrs)


def budgeted(sandbox: Any, source: str, budget: Budget) -> Any:
    """A jinja2 template that counts what it does.

    Args:
        sandbox: its environment, which is not changed.
        source: its source.
        budget: where it counts.
    """
    environment = sandbox.overlay()
    environment.filters = {name: _filter(name, made, budget) for name, made in environment.filters.items()}
    environment.filters |= _counting_filters(budget)
    environment.intercepted_binops = frozenset(("*", "**", "%"))
    environment.call_binop = _operators(environment, budget)
    environment.call = _calls(environment.call, budget)
    tree = _counter().visit(environment.parse(source))
    return environment.template_class.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _counting_filters(budget: Budget) -> dict[str, Callable[..., Any]]:
    """The filters that `_counter` adds; they see the context, so that they are not evaluated when compiled."""
    from jinja2 import pass_context

    @pass_context
    def text(context: Any, value: Any) -> str:
        if type(value) is not str:
            value = str(budget.made(value))
        budget.characters -= len(value)
        if budget.characters < 0:
            budget.step()
        return value  # type: ignore[no-any-return]

    @pass_context
    def tick(context: Any, characters: int) -> None:
        budget.steps -= 1
        budget.characters -= characters
        if budget.steps < 0 or budget.characters < 0:
            budget.step()

    @pass_context
    def made(context: Any, value: Any) -> Any:
        return budget.made(value, copied=False)

    return {_TEXT: text, _TICK: tick, _MADE: made}


def _written(statements: list[Any]) -> int:
    """Characters of the template that a pass writes, without those of loops in it."""
    from jinja2 import nodes

    found = 0
    for each in statements:
        if isinstance(each, nodes.TemplateData):
            found += len(each.data)
        elif not isinstance(each, nodes.For | nodes.Macro | nodes.CallBlock):
            found += _written(list(each.iter_child_nodes()))
    return found


def _may_be_new(node: Any) -> bool:
    """Whether an element of a list or an object may be a text that is made for it, as by `+` or a slice."""
    from jinja2 import nodes

    while isinstance(node, nodes.Getattr) or (
        isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return not isinstance(node, nodes.Name | nodes.Const | nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair)


def _counter() -> Any:
    """Visitor that adds the counting filters to a syntax tree."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def counted(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Counter(NodeTransformer):
        def _body(self, node: Any) -> Any:
            cost = _written(node.body)
            self.generic_visit(node)
            tick = counted(nodes.Const(cost, lineno=node.lineno), _TICK)
            node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
            return node

        visit_For = visit_Macro = visit_CallBlock = _body

        def visit_Assign(self, node: Any) -> Any:
            self.generic_visit(node)
            node.node = node.node if isinstance(node.node, nodes.Const) else counted(node.node, _MADE)
            return node

        def _parts(self, node: Any) -> Any:
            self.generic_visit(node)
            plain = (nodes.TemplateData, nodes.Const)
            node.nodes = [each if isinstance(each, plain) else counted(each, _TEXT) for each in node.nodes]
            return node

        visit_Output = visit_Concat = _parts

        def _literal(self, node: Any) -> Any:
            is_read = getattr(node, "ctx", "load") == "load"
            constant = all(isinstance(each, nodes.Const) for each in node.iter_child_nodes())
            texts = [index for index, each in enumerate(getattr(node, "items", ())) if _may_be_new(each)]
            self.generic_visit(node)
            if constant or not is_read:
                return node
            for index in texts:
                node.items[index] = counted(node.items[index], _MADE)
            return counted(node, _MADE)

        visit_List = visit_Tuple = visit_Dict = _literal

        def visit_Pair(self, node: Any) -> Any:
            texts = [name for name in ("key", "value") if _may_be_new(getattr(node, name))]
            self.generic_visit(node)
            for name in texts:
                setattr(node, name, counted(getattr(node, name), _MADE))
            return node

    return Counter()


def _operators(environment: Any, budget: Budget) -> Callable[..., Any]:
    table = environment.binop_table

    def operate(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_format(left, _conversions, budget)
        elif operator == "**":
            budget.number(left)
            if isinstance(right, int) and abs(right) > _MAX_POWER:
                raise OverBudget(f"the chat template computes a power above {_MAX_POWER}")
        else:
            _check_repeats(left, right, budget)
            _check_repeats(right, left, budget)
        return budget.made(table[operator](left, right))

    return operate


def _check_repeats(value: Any, count: Any, budget: Budget) -> None:
    if isinstance(count, int) and isinstance(value, str | list | tuple):
        budget.step(count // _STEP_ELEMENTS if not isinstance(value, str) else 0, len(value) * max(count, 0))


def _check_format(text: Any, specifications: Callable[[str], Iterator[str]], budget: Budget) -> None:
    """Check the widths of a format, which must be written in it, and count what they make."""
    if not isinstance(text, str):
        return
    budget.step(1, len(text))
    for found in specifications(text):
        if "*" in found or "{" in found:
            raise OverBudget("the chat template formats with a width that is not written in the format")
        for digits in re.findall(r"\d+", found):
            if len(digits) > _MAX_DIGITS:
                raise OverBudget(f"the chat template formats with a width of more than {_MAX_DIGITS} digits")
            budget.step(0, int(digits))


def _conversions(text: str) -> Iterator[str]:
    """Width and precision of each conversion of a format of the operator `%`."""
    place = text.find("%")
    while place >= 0:
        place += 1
        depth = 0
        while text[place : place + 1] == "(" or depth:
            if place == len(text):
                return
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            place += 1
        found = _CONVERSION.match(text, place)
        assert found is not None, "it matches nothing, too"
        yield found[1]
        place = text.find("%", found.end())


def _fields(text: str) -> Iterator[str]:
    """Specification of each field of a format in braces."""
    try:
        for _, _, found, _ in string.Formatter().parse(text):
            yield (found or "").replace("*", "")
    except ValueError:  # the method raises it
        return


def _width(value: int | str) -> int:
    return len(value) if isinstance(value, str) else value


def _growth(name: str, value: Any, arguments: list[Any], budget: Budget) -> None:
    """Measure the text that a method or filter of this name makes of `value`, if it may be much longer."""
    if name == "%":
        _check_format(value, _conversions, budget)
    elif name in ("format", "format_map"):
        _check_format(value, _fields, budget)
    else:
        for each in arguments:
            budget.number(each)
    texts = [each for each in arguments if isinstance(each, str)]
    if not isinstance(value, str):
        return
    if name == "replace" and len(texts) >= 2:
        budget.step(1, value.count(texts[0]) * len(texts[1]))
    elif name in ("indent", "wordwrap", "expandtabs"):
        width = max((_width(each) for each in arguments if isinstance(each, str | int)), default=8)
        places = value.count("\t") if name == "expandtabs" else value.count("\n") + 1
        budget.step(1, max(0, width) * places + (len(value) if texts else 0) * max(map(len, texts), default=0))
    elif name == "translate":
        tables = [each for each in arguments if isinstance(each, dict)]
        longest = max((len(to) for table in tables for to in table.values() if isinstance(to, str)), default=1)
        budget.step(1, len(value) * longest)


def _joined(separator: Any, parts: Any, budget: Budget) -> Any:
    """The parts that are joined, as a list whose joined length is counted."""
    parts = parts if isinstance(parts, list | tuple) else list(_stepped(parts, budget))
    if isinstance(separator, str):
        budget.step(len(parts) // _STEP_ELEMENTS, len(separator) * len(parts))
    budget.made(parts)
    return parts


def _stepped(values: Any, budget: Budget) -> Iterator[Any]:
    for value in values:
        budget.step()
        yield value


def _filter(name: str, made: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """A filter that counts."""
    place = 1 if getattr(made, "jinja_pass_arg", None) is not None else 0
    shows = name in ("string", "tojson", "pprint", "format", "urlize", "escape", "e", "forceescape", "xmlattr")

    @wraps(made)
    def counted(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else None
        arguments = [*args[place + 1 :], *kwargs.values()]
        if shows:
            budget.made(given)
        if name == "tojson" and any(isinstance(each, int | str) and _width(each) > _MAX_INDENT for each in arguments):
            raise OverBudget(f"the chat template indents by more than {_MAX_INDENT} characters")
        if name == "join":
            given = _joined(arguments[0] if arguments else "", given, budget)
            args = (*args[:place], given, *args[place + 1 :])
        budget.seen(given)
        _growth("%" if name == "format" else name, given, arguments, budget)
        found = made(*args, **kwargs)
        return budget.made(found) if isinstance(found, str | list | tuple | dict) else found

    @wraps(made)
    def seen(*args: Any, **kwargs: Any) -> Any:
        budget.seen(args[place] if len(args) > place else None)
        return made(*args, **kwargs)

    return seen if name in _SMALL else counted


def _calls(call: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """The sandbox's call of a function or method, counted."""

    def counted(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the sandbox wraps `format`
        if isinstance(owner, str | bytes | int | list | tuple | dict):
            name = function.__name__
            if name == "join" and args:
                args = (_joined(owner, args[0], budget),)
            _growth(name, owner, [*args, *kwargs.values()], budget)
        for each in (*args, *kwargs.values()):
            if type(each) is str:
                budget.step(0, len(each))
        budget.step()
        found = call(context, function, *args, **kwargs)
        return budget.made(found) if type(found) in (str, list, tuple, dict) else found

    return counted
