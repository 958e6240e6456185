"""Text for people and for pipes: what is escaped, and streams that escape whatever is written to them."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import sys
import unicodedata

import pytest

from batchgen.request.printable import EscapedJson, EscapedText, json_printable, printable

DANGEROUS = {"Cc", "Cf", "Zl", "Zp", "Cs", "Cn", "Co"}
"""Categories of characters that control a terminal or the direction of text, have no width, or mean nothing yet."""


def test_every_character_of_unicode_is_shown_or_escaped() -> None:
    characters = [chr(code) for code in (*range(0x20000), *range(0xE0000, 0xE0200), sys.maxunicode)]
    escaped = [c for c in characters if unicodedata.category(c) in DANGEROUS]
    shown = "".join(sorted(set(characters) - set(escaped)))
    assert printable(shown) == json_printable(shown) == shown
    for character in escaped:
        assert re.fullmatch(r"\\([abtnvfr]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})", printable(character))
    text = "".join(c for c in escaped if not "\ud800" <= c <= "\udfff")
    written = json_printable(json.dumps(text, ensure_ascii=False))
    assert written.isascii()
    assert json.loads(written) == text


def test_kept_characters_and_examples() -> None:
    text = "a\tb\nc\x1b[31m\x9b\u202e\u2028\u200d\U000e0041\ud800é\u3000東"
    assert printable(text) == r"a\tb\nc\x1b[31m\x9b\u202e\u2028\u200d\U000e0041\ud800é" + "\u3000東"
    assert printable(text, keep="\n\t").startswith("a\tb\nc\\x1b")
    value = {"k\x7f": [text, 1.5, None]}
    for indent in (None, 2):
        shown = json_printable(json.dumps(value, ensure_ascii=False, indent=indent))
        assert json.loads(shown) == value
        assert shown.replace("\n", "").replace("\u3000", "").isprintable()


class Stream(io.StringIO):
    def __init__(self, terminal: bool = False, problem: int = 0) -> None:
        super().__init__()
        self.terminal, self.problem = terminal, problem

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.problem:
            raise OSError(self.problem, "cannot be written")
        return super().write(text)


def test_a_stream_escapes_what_anything_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do, with `print`, loggers and their own calls."""
    below = Stream()
    stream = EscapedText(below, lasting=True)
    monkeypatch.setattr(sys, "stderr", stream)
    print("\x1b[2Ja", file=sys.stderr)
    stream.writelines(["b\x9b\n", "c\td\u202e\n"])
    logging.StreamHandler().emit(logging.makeLogRecord({"msg": "e\x07f"}))
    assert below.getvalue() == "\\x1b[2Ja\nb\\x9b\nc\td\\u202e\ne\\x07f\n"


def test_a_stream_that_is_not_utf_8_gets_escapes_that_json_reads() -> None:
    below = io.BytesIO()
    stream = EscapedText(io.TextIOWrapper(below, "ascii", write_through=True), lasting=False)
    print(json.dumps({"a": "é東😀"}, ensure_ascii=False), file=stream)
    assert json.loads(below.getvalue()) == {"a": "é東😀"}


def test_progress_bars_of_libraries_move_the_cursor_of_a_terminal() -> None:
    for terminal, bar in ((True, "\r 50%\x1b[2J"), (False, "\\r 50%\x1b[2J")):
        below = Stream(terminal)
        stream = EscapedText(below, lasting=True)
        for text in ("\r 50%\x1b[2J", "\n\x1b[A", "x\r"):
            stream.write(text)
        bar = bar.replace("\x1b[2J", "\\x1b[2J")
        assert below.getvalue() == bar + ("\n\x1b[A" if terminal else "\n\\x1b[A") + "x\\r"


@pytest.mark.parametrize("problem", [errno.EIO, errno.EPIPE, errno.ENOSPC])
def test_messages_that_cannot_be_written_are_dropped_and_results_are_not(problem: int) -> None:
    print("message", file=EscapedText(Stream(problem=problem), lasting=True), flush=True)
    with pytest.raises(OSError, match="cannot be written"):
        print("result", file=EscapedText(Stream(problem=problem), lasting=False))


def test_lines_of_json_keep_their_values() -> None:
    below = io.BytesIO()
    stream = EscapedJson(below)
    lines = [json.dumps({"a": text}, ensure_ascii=False).encode() + b"\n" for text in ("é", "\x7f", "\x9b\u202e", "b")]
    stream.write(lines[0] + lines[1])
    stream.writelines(lines[2:])
    text = below.getvalue().decode()
    assert text == '{"a": "é"}\n{"a": "\\u007f"}\n{"a": "\\u009b\\u202e"}\n{"a": "b"}\n'
