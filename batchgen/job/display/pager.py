"""Text on a terminal: through the reader's pager if it is longer than the screen."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout

from rich.console import Console

from batchgen.request.printable import unescaped


def paged(text: str) -> None:
    """Write text to stdout, a terminal: through `$PAGER` or `less -R` if it is longer than the screen.

    Args:
        text: lines, which may hold sequences for colours; all else in them is escaped already.
    """
    stream = unescaped(sys.stdout)
    if text.count("\n") < Console(file=stream).size.height:
        stream.write(text)
        return
    import pydoc  # slow, and most texts are short

    os.environ.setdefault("LESS", "-RFX")  # colours pass through, and the text stays on the screen
    with redirect_stdout(stream):
        pydoc.pager(text)
