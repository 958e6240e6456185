"""File operations of a job's output: all of them go through `batchgen.data.files`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import batchgen
from tests.cases import each

PACKAGE = Path(batchgen.__file__).parent
AT_ONCE = {"open", "io.open", "io.FileIO", "mmap.mmap", "np.memmap", "fcntl.flock"}
METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir",
    "read_bytes", "read_text", "readlink", "rename", "resolve", "rglob", "rmdir", "samefile", "stat", "symlink_to",
    "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
"""Methods of `Path` that no other object of these modules has."""
HARMLESS = {
    "os._exit",
    "os.chdir",
    "os.environ.get",
    "os.environ.setdefault",
    "os.getpid",
    "os.stat_result",
    "os.path.abspath",
    "os.path.relpath",
    "os.path.samestat",
    "os.sched_getaffinity",
    "os.sched_setaffinity",
    "os.strerror",
    "os.fspath",
}


def _modules() -> dict[str, Path]:
    """The modules that handle the output, by name; most of `data/read` reads the input."""
    files = {path for folder in ("data", "job") for path in (PACKAGE / folder).rglob("*.py")}
    names = {str(path.relative_to(PACKAGE).with_suffix("")): path for path in sorted(files)}
    read = {name for name in names if name.startswith("data/read/") and name != "data/read/reserved_paths"}
    return {name: path for name, path in names.items() if name not in read | {"data/files"}}


def _direct_operations(source: str) -> list[str]:
    """The calls in a source text that reach the file system without `batchgen.data.files`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [f"import {name}" for name in names if name in ("shutil", "glob")]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        direct = name in AT_ONCE or method in METHODS or (name.startswith("os.") and name not in HARMLESS)
        opens = method == "open" and not name.startswith(("system.", "pa.", "archive.", "self.", "service."))
        renames = method == "replace" and len(node.args) == 1 and not node.keywords
        if (direct and not name.startswith("system.")) or opens or renames:
            found.append(f"line {node.lineno}: {name}")
    return found


@each("name, path", _modules().items())
def test_a_module_of_the_output_reaches_files_only_through_the_one_module(name: str, path: Path) -> None:
    assert _direct_operations(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "open('a')", "path.open('rb')", "path.write_text('a')", "path.unlink()", "os.replace(a, b)", "import shutil",
        "a.replace(b)", "os.open(a, 0)", "path.exists()", "mmap.mmap(1, 0)", "np.memmap(a)", "fcntl.flock(1, 2)",
    ],
)  # fmt: skip
def test_a_direct_operation_is_found(line: str) -> None:
    assert _direct_operations(line)


@pytest.mark.parametrize("line", ["text.replace('a', 'b')", "system.open(a, 0)", "os.getpid()", "replace(a, b=1)"])
def test_other_calls_are_not(line: str) -> None:
    assert not _direct_operations(line)
