"""Text that may go to a terminal, and text that may go to a file."""

from __future__ import annotations

__all__ = ["encodable", "printable"]


def printable(text: str, keep: str = "") -> str:
    """Control characters as escapes: text that was generated or read must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def encodable(text: str) -> str:
    r"""What of a file's name is no UTF-8, and in Python a lone surrogate, as an escape: `caf\udce9.jsonl`.

    In JSON that is JSON's own escape: what reads it back finds the file under its name.
    """
    return text.encode("utf-8", "backslashreplace").decode()
