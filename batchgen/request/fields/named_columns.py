"""Fields of rows that options name: `--prompt-column`, `--id-column` and their like, and those of a prompt template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from batchgen.errors import RowError

ID_NAMES = ("id", "rid", "custom_id")
"""Names of the row's id."""
PROMPT_FIELDS = ("text", "prompt")
_REPLACED = {
    "prompt": PROMPT_FIELDS,
    "template": (*PROMPT_FIELDS, "messages", "input_ids", "input_embeds"),
    "id": ID_NAMES,
    "image": ("image_data",),
    "audio": ("audio_data",),
}
"""What a name is given for -> the fields that the named one replaces."""


class RowTemplate(Protocol):
    """Makes the prompts of rows from their fields."""

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that it reads."""
        ...

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[str | RowError]:
        """The text of each row's prompt, or the JSON of its messages, or why there is none."""
        ...


class NamedColumns(NamedTuple):
    """The fields that the run reads prompts, ids, images and sounds from; None where no option names one."""

    prompt: str | None = None
    id: str | None = None
    image: str | None = None
    audio: str | None = None
    template: RowTemplate | None = None
    """Makes the prompts, instead of a field that contains them."""

    def options(self) -> dict[str, str]:
        """Name of a field -> the option that names it."""
        return {name: f"--{role}-column" for role, name in self._asdict().items() if isinstance(name, str)}

    def wanted(self) -> dict[str, str]:
        """Field that the input must have -> the option that names it. A row may lack its prompt, which is its error."""
        read = dict.fromkeys(sorted(self.template.fields), "--prompt-template") if self.template is not None else {}
        return read | {name: option for name, option in self.options().items() if name != self.prompt}

    def replaced(self) -> tuple[str, ...]:
        """Fields that are carried as data, unless they are named themselves: others take their place."""
        return tuple(name for role, names in _REPLACED.items() if getattr(self, role) is not None for name in names)

    def media(self) -> list[tuple[str, str]]:
        """(column, field that it becomes) of each column of images or sounds."""
        named = {"image_data": self.image, "audio_data": self.audio}
        return [(name, field) for field, name in named.items() if name is not None]

    def fields(self) -> dict[str, str]:
        """Column of a table -> the field that it is read as, where that has another name; empty for plain text."""
        plain = {name: "" for name in (self.prompt, self.id) if name is not None}
        return dict.fromkeys(self.replaced(), "extra") | dict(self.media()) | plain


UNNAMED = NamedColumns()
