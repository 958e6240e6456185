"""The console for rich text: what it shows is escaped, and a terminal that was closed does not end a job."""

from __future__ import annotations

from contextlib import suppress
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from batchgen.request.printable import printable, unescaped


class SafeConsole(Console):
    """A console without highlighting, whose text is escaped by `printable` when it is drawn.

    Text whose width matters, as in a table, is better escaped before: an escape is wider than its character.
    """

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False) -> None:
        super().__init__(file=file, stderr=stderr, highlight=False)
        self.push_render_hook(_Escaping())

    def on_broken_pipe(self) -> None:
        """Stop printing; rich would end the process."""
        self.quiet = True


class LastingStream:
    """A stream that may be gone: what cannot be written any more is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unescaped(stream)

    @property
    def rich_proxied_file(self) -> LastingStream:
        """The stream that rich writes to."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text if that is possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if that is possible."""
        with suppress(OSError):
            self._stream.flush()


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n\t"), segment.style)
