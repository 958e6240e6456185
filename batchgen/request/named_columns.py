"""Fields of rows that options name: `--prompt-column`, `--id-column`, `--image-column` and `--audio-column`."""

from __future__ import annotations

from typing import NamedTuple

from batchgen.request.fields import ID_NAMES
from batchgen.request.media import MEDIA_FIELDS

PROMPT_FIELDS = ("text", "prompt")
"""Fields that a named prompt replaces."""


class NamedColumns(NamedTuple):
    """The fields that the run reads prompts, ids, images and sounds from; None where no option names one."""

    prompt: str | None = None
    id: str | None = None
    image: str | None = None
    audio: str | None = None

    def options(self) -> dict[str, str]:
        """Name of a field -> the option that names it."""
        return {name: f"--{role}-column" for role, name in self._asdict().items() if name is not None}

    def replaced(self) -> tuple[str, ...]:
        """Fields that are carried as data, unless they are named themselves: others take their place."""
        return (
            *(PROMPT_FIELDS if self.prompt is not None else ()),
            *(ID_NAMES if self.id is not None else ()),
            *(field for _, field in self.media()),
        )

    def media(self) -> list[tuple[str, str]]:
        """(column, field that it becomes) of each column of images or sounds."""
        named = zip((self.image, self.audio), (MEDIA_FIELDS["image"], MEDIA_FIELDS["audio"]), strict=True)
        return [(name, field) for name, field in named if name is not None]

    def fields(self) -> dict[str, str]:
        """Column of a table -> the field that it is read as, where that has another name; empty for plain text."""
        found = {field: "extra" for _, field in self.media()} | dict(self.media())
        plain = (*(PROMPT_FIELDS if self.prompt is not None else ()), self.prompt, self.id)
        return found | {name: "" for name in plain if name is not None}


UNNAMED = NamedColumns()
