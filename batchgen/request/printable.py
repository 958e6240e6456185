"""Text for terminals and UTF-8 files: escaped text, and sizes in bytes."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Text with control characters escaped, except those in `keep`, so that it cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


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
