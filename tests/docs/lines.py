"""Lines of the package and of its tests: `python -m tests.docs.lines`.

Lines of code are those that hold a part of a statement: no blank line, no comment and no docstring counts.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines(folder: str) -> tuple[int, int]:
    """(lines, lines of code) of all Python files of a folder of the repository."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    return sum(text.count("\n") for text in texts), sum(map(code_lines, texts))


def code_lines(text: str) -> int:
    """Lines of code of a module. A text that is a statement documents what is above it, as a docstring does."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _IGNORED:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def main() -> None:
    """Print both counts of each folder."""
    for folder in ("batchgen", "tests"):
        every, code = lines(folder)
        print(f"{folder:<9} {every:>7,} lines, {code:>7,} of code")


if __name__ == "__main__":
    main()
