"""Names by which a row may name the run's model."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field

from batchgen.errors import RowError
from batchgen.request.checks import invalid, show

ANY = "*"
"""Value of `model` that always is the run's model."""
_CACHED_MODEL = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+/?$")
"""Folder of a model in the Hugging Face cache."""
_MAX_SHOWN = 80
_MAX_CHARS = 4096
"""Longest name that is compared: a name of many colons takes quadratic time."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of the run's model. Names are equal if they are, or if the last components of their paths are."""

    names: frozenset[str] = frozenset()
    accept_all: bool = False
    """Whether rows may have any other name, too."""
    _last: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_last", frozenset(map(_last_component, self.names)) - {""})

    @classmethod
    def of(cls, model: str, served: Collection[str] = (), *, accept_all: bool = False) -> ModelNames:
        """The names of a model given as `model`, with further names `served` from the command line."""
        cached = _CACHED_MODEL.search(model)
        hub_id = cached[1].replace("--", "/") if cached else ""
        return cls(frozenset({model, _last_component(model), hub_id, *served} - {""}), accept_all)

    def split(self, model: str | None, adapters: Collection[str] = ()) -> tuple[bool, str | None]:
        """(whether a row's `model` is the run's, the adapter that it names as `base:adapter`).

        An absent or empty name is the run's model.
        """
        if model is not None and len(model) > _MAX_CHARS:
            return self.accept_all, None
        if not model or self._is_model(model):
            return True, None
        ends = [place for place, character in enumerate(model) if character == ":"]
        for end in reversed(ends):  # names may contain colons: the longest one counts
            adapter = model[end + 1 :]
            if adapter and (self._is_model(model[:end]) or (self.accept_all and adapter in adapters)):
                return True, adapter
        return self.accept_all, None

    def _is_model(self, name: str) -> bool:
        return name == ANY or name in self.names or _last_component(name) in self._last

    def refusal(self, model: str, field: str = "model", adapters: Collection[str] = ()) -> RowError:
        """`invalid_field` error for another model that the row's `field` names, with the ways to go on."""
        what = "is" if field == "model" else "names the model"
        if model in adapters:
            return invalid(field, f"{what} {show(model)}, an adapter; name it as {show(f'{ANY}:{model}')}")
        own = " or ".join(sorted(self.names)) or ANY
        name = shlex.quote(model) if len(model) <= _MAX_SHOWN and model.isprintable() else "NAME"
        remedy = f"accept this name with --served-model-name {name}, or every name with --any-model"
        remedy += " (and --retry-errors, if its rows were refused before)"
        return invalid(field, f"{what} {show(model)}, but this run's model is {own}; correct it, or {remedy}")


def _last_component(name: str) -> str:
    """Last component of a path or hub id, the same for all spellings of one path."""
    last = posixpath.basename(posixpath.normpath(name))
    return posixpath.basename(os.path.abspath(name)) if last in (".", "..") else last  # noqa: PTH100  no file is read
