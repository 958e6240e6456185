"""TOML files of the user that define something: a workload, a benchmark, a machine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.request.foreign_text import ForeignTextError, file_content, read_toml


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix of an error message about `word` that names the most similar known word; empty if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def read_definition(path: Path, flag: str, what: str) -> dict[str, Any]:
    """The table of a TOML file of the user's, named as `what`. Error messages begin with `flag`.

    Raises:
        UsageError: the file cannot be read, or is not TOML.
    """
    try:
        return read_toml(file_content(path))
    except OSError as error:
        raise UsageError(f"{flag}cannot read {what}{path}: {error.strerror}") from None
    except ForeignTextError as error:
        raise UsageError(f"{flag}{path} {error}") from None


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Check that a table has no key but `known` ones. Error messages begin with `where`.

    Raises:
        UsageError: it has another one.
    """
    known = list(known)
    for key in sorted(table.keys() - set(known)):
        raise UsageError(f"{where}: unknown key `{key}`{did_you_mean(key, known)}; known: {', '.join(known)}")
