"""The console for rich text escapes whatever is printed on it, and outlives its terminal."""

from __future__ import annotations

import errno
import io

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchgen.job.display.console import LastingStream, SafeConsole

HOSTILE = "a\x1b]0;t\x07\x9b2J\u202e\u200b"
SHOWN = "a\\x1b]0;t\\x07\\x9b2J\\u202e\\u200b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_texts_tables_and_frames_are_escaped(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE))
    for shown in (HOSTILE, Text(HOSTILE, style="red"), table, Panel(HOSTILE, title="x")):
        console = SafeConsole(file=stream())
        console.print(shown, markup=False, soft_wrap=True)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for raw in ("\x1b]", "\x07", "\x9b", "\u202e", "\u200b"):
            assert raw not in text
        assert SHOWN[:8] in text


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_a_terminal_that_is_gone(number: int) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

    console = SafeConsole(file=LastingStream(Gone()))  # type: ignore[arg-type]
    console.print("a")
    console.print("b")
