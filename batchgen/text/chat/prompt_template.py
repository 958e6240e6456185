"""`PromptTemplate`: prompts made from the fields of rows by a Jinja template, `--prompt-template`.

It is rendered in the process of chat templates, under the same limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.request.foreign_text import ForeignTextError, read_json
from batchgen.request.printable import printable
from batchgen.text.chat.template_process import (
    ROW,
    Rendering,
    RenderLimits,
    TemplateFailure,
    render_templates,
    template_reads,
)

_OPTION: Final = "--prompt-template"
_LOOKS_LIKE_MESSAGES: Final = re.compile(r"\s*\[\s*\{\s*[\"']role[\"']\s*:")
_FUNCTIONS: Final = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception"})
"""What templates may call."""
_NOT_COMPILED: Final = ("TemplateSyntaxError", "TemplateAssertionError", "ChanceError")
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The time of prompt templates, which cannot read it."""


class PromptTemplate:
    """A template over the fields of a row: each is a variable, and `row` has them all by name.

    A field that is null or missing is undefined: to print it is an error of the row.
    """

    def __init__(self, source: str, limits: RenderLimits | None = None) -> None:
        """`source`: text of the template. `limits`: of each row; None for those of chat templates.

        Raises:
            UsageError: it cannot be compiled, or reads no field.
        """
        self._source = source
        self._limits = limits or RenderLimits()
        variables = template_reads(source).variables
        self._whole_row = ROW in variables
        """Whether it reads the row as a mapping."""
        self.fields = variables - {ROW, *_FUNCTIONS}
        """The fields that it reads by their name as a variable."""
        (probe,) = render_templates([Rendering(source, {}, of_fields=True)], _EPOCH, self._limits)
        if isinstance(probe, TemplateFailure) and probe.kind in _NOT_COMPILED:
            raise UsageError(f"`{_OPTION}` is not a template: {printable(str(probe))}")
        if not variables - _FUNCTIONS:
            raise UsageError(f"`{_OPTION}` reads no field of the rows: write {{{{ NAME }}}} where its value goes")

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[str | RowError]:
        """The text of each row's prompt, or why there is none."""
        there = [{name: value for name, value in row.items() if value is not None} for row in rows]
        renderings = [
            Rendering(
                self._source,
                ({ROW: row} if self._whole_row else {}) | {name: row[name] for name in self.fields & row.keys()},
                of_fields=True,
            )
            for row in there
        ]
        return [self._prompt(text) for text in render_templates(renderings, _EPOCH, self._limits)]

    def _prompt(self, text: str | BaseException) -> str | RowError:
        if not isinstance(text, str):
            return RowError(ErrorCode.INVALID_FIELD, f"`{_OPTION}` failed: {printable(str(text))}")
        if _LOOKS_LIKE_MESSAGES.match(text):
            try:
                read_json(text)
            except ForeignTextError as problem:
                remedy = "write each value as {{ NAME | tojson }}"
                return RowError(
                    ErrorCode.INVALID_FIELD, f"`{_OPTION}` makes a list of messages that {problem}; {remedy}"
                )
        return text
