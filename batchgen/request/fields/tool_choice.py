"""`ToolChoice`: whether a row's answer calls its tools, as OpenAI's `tool_choice` says it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from batchgen.request.checks import invalid, show
from batchgen.request.foreign_text import ForeignTextError, read_json


class ToolChoice(NamedTuple):
    """A row's rule for calls of its tools."""

    mode: Literal["none", "auto", "required"] = "auto"
    """Whether there are no calls, calls as the model decides, or at least one call."""
    names: tuple[str, ...] = ()
    """The functions that may be called in `required` mode; all if there are none."""
    once: bool = False
    """Whether there is exactly one call: of a named function."""


AUTO: Final = ToolChoice()
"""The model decides."""
_MODES: Final[dict[str, ToolChoice]] = {"none": ToolChoice("none"), "auto": AUTO, "required": ToolChoice("required")}
_ALLOWED: Final = "allowed_tools"


def tool_choice(name: str, value: Any) -> ToolChoice:
    """Check a value of `tool_choice`: a mode, a named function, or the tools that are allowed."""
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in _MODES:
        return _MODES[value]
    if isinstance(value, str) and value.lstrip().startswith("{"):  # a column of strings may hold JSON
        with suppress(ForeignTextError):
            value = read_json(value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice("required", (_function_name(name, value),), once=True)
    if kind == _ALLOWED:
        return _allowed(name, value.get(_ALLOWED, value))
    wanted = 'must be none, auto, required or {"type": "function", "function": {"name": NAME}}'
    raise invalid(name, f"{wanted}, got {show(value)}")


def _allowed(name: str, value: Any) -> ToolChoice:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    if not isinstance(tools, list | tuple) or not tools or value.get("mode") != "required":
        raise invalid(name, "has allowed tools, which need the mode required and a list of functions as `tools`")
    return ToolChoice("required", tuple(_function_name(name, tool) for tool in tools))


def _function_name(name: str, value: Any) -> str:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(named, str) or not named:
        raise invalid(name, f"must name a function, got {show(value)}")
    return named
