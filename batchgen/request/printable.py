"""Text for people: what controls a terminal, changes the order of text or cannot be seen is escaped; sizes in bytes.

Rows, file names, models and libraries bring such characters. `printable` escapes them, and every stream for people goes
through it: see `EscapedText`. JSON is escaped by `json_printable`, which keeps its values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, BinaryIO, TextIO
from unicodedata import category

_UNUSUAL = re.compile("[^ -~]+")
_CURSOR = re.compile(r"\r?(?:\n|\x1b\[A)*")
"""What progress bars of libraries write before their text, to draw over an earlier line of a terminal."""


def printable(text: str, keep: str = "") -> str:
    r"""Text that cannot control or deceive a terminal, as in `\x1b[31m`, `\u202e`, `\U000e0041`.

    Escaped are control characters (C0, DEL, C1), marks of the direction of text, line and paragraph separators,
    characters without a width such as joiners and tags, surrogates, and characters that Unicode has not assigned.

    Args:
        text: any text.
        keep: characters that are not escaped, such as a newline.
    """
    return _escaped(text, keep, lambda character: character.encode("unicode_escape").decode())


def json_printable(text: str) -> str:
    """JSON text, whose strings have the same characters escaped by JSON's rules; it holds the same values.

    Lone surrogates, such as the bytes of a file name that are not UTF-8, are escaped, so that the text is UTF-8 and the
    name still finds the file.
    """
    return _escaped(text, "\n", _json_escape)


def _escaped(text: str, keep: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    kept = {*keep, *(c for c in set(text) if c.isprintable() or category(c) == "Zs")}  # a space of any width
    return _UNUSUAL.sub(lambda match: "".join(c if c in kept else escape(c) for c in match[0]), text)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


class EscapedText:
    """A text stream whose text is escaped as it is written, also by libraries.

    Bytes written to its `buffer` are not escaped. What progress bars of libraries write to move the cursor passes on a
    terminal.
    """

    def __init__(self, stream: TextIO, *, lasting: bool) -> None:
        """`lasting`: text that cannot be written is dropped, as messages to a terminal that was closed."""
        self.rich_proxied_file = stream  # rich looks for this name: its consoles escape what they show
        self._lasting = lasting

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Write text, escaped but for newlines and tabs."""
        cursor = _CURSOR.match(text) if self.isatty() else None
        kept = "" if cursor is None else cursor[0]
        shown = kept + printable(text[len(kept) :], keep="\n\t")
        with self._dropping():
            try:
                self.rich_proxied_file.write(shown)
            except UnicodeEncodeError:  # the stream is not UTF-8; these escapes are JSON's, too
                self.rich_proxied_file.write("".join(c if c.isascii() else _json_escape(c) for c in shown))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        with self._dropping():
            self.rich_proxied_file.flush()

    def _dropping(self) -> AbstractContextManager[None]:
        return suppress(OSError) if self._lasting else nullcontext()


class EscapedJson:
    """A binary stream of lines of JSON in UTF-8, which are escaped by `json_printable` as they are written."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, lines: bytes) -> int:
        """Write whole lines."""
        plain = lines.isascii() and b"\x7f" not in lines
        self._stream.write(lines if plain else json_printable(lines.decode()).encode())
        return len(lines)

    def writelines(self, lines: Iterable[bytes]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)


def unescaped(stream: TextIO) -> TextIO:
    """The stream below an `EscapedText`, for sequences that control a terminal on purpose."""
    return stream.rich_proxied_file if isinstance(stream, EscapedText) else stream


def encodable(text: str) -> str:
    r"""Text with lone surrogates escaped, as in `caf\udce9.jsonl`: the bytes of a file name that are not UTF-8.

    JSON reads the escape back as the same character, so the name still finds the file.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def format_size(size: float) -> str:
    """Human-readable form of `size` bytes: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_kv_peak(by_group: Mapping[str, int]) -> str:
    """Bytes of keys and values by kind of layers: `1.5 GiB (full 1.0 GiB, window 512.0 MiB)`."""
    total = format_size(sum(by_group.values()))
    parts = ", ".join(f"{kind} {format_size(size)}" for kind, size in by_group.items())
    return f"{total} ({parts})" if len(by_group) > 1 else total
