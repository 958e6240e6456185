"""A recorded run, and what a power loss leaves of its files, under the strict model of POSIX.

What a file holds is durable after fsync of the file. Its name is durable after fsync of its folder: a creation, a
rename (in either folder) or a removal before that may be lost. Each change that was not synced is lost or kept
independently of all others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.layer import Layer

Keep = Callable[[], bool]
"""Whether a change that was not synced is kept."""


@dataclass(slots=True)
class File:
    """Content as the process sees it, as it was at the last fsync, and the changes since then."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes written there; None: cut off there)."""

    def change(self, offset: int, data: bytes | None) -> None:
        _apply(self.live, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.pending.clear()

    def after_loss(self, keep: Keep) -> bytes:
        content = bytearray(self.durable)
        for offset, data in self.pending:
            if keep():
                _apply(content, offset, data)
        return bytes(content)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
        return
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


@dataclass(slots=True)
class Folder:
    """Names as the process sees them, as they were at the last fsync, and the changes since then."""

    live: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, File | Folder | None]] = field(default_factory=list)

    def change(self, name: str, node: File | Folder | None) -> None:
        _name(self.live, name, node)
        self.pending.append((name, node))

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.pending.clear()

    def after_loss(self, keep: Keep) -> dict[str, File | Folder]:
        names = dict(self.durable)
        for name, node in self.pending:
            if keep():
                _name(names, name, node)
        return names


def _name(names: dict[str, File | Folder], name: str, node: File | Folder | None) -> None:
    names.pop(name, None)
    if node is not None:
        names[name] = node


Tree = dict[str, bytes | None]
"""Path -> content of a file, None for a folder."""


class Disk:
    """The files below a folder."""

    def __init__(self, tree: Tree) -> None:
        """The given files, all durable."""
        self._top = Folder()
        self._handles: dict[int, File] = {}
        for path, content in sorted(tree.items()):
            folder, name = self._folder(path)
            folder.live[name] = Folder() if content is None else File(bytearray(content), content)
        for each in self._folders(self._top):
            each.sync()

    def _folders(self, folder: Folder) -> Iterator[Folder]:
        yield folder
        for node in folder.live.values():
            if isinstance(node, Folder):
                yield from self._folders(node)

    def _folder(self, path: str) -> tuple[Folder, str]:
        *above, name = path.split("/")
        folder = self._top
        for each in above:
            found = folder.live[each]
            assert isinstance(found, Folder)
            folder = found
        return folder, name

    def _node(self, path: str) -> File | Folder:
        if path == ".":
            return self._top
        folder, name = self._folder(path)
        return folder.live[name]

    def apply(self, name: str, path: str, values: tuple[Any, ...]) -> None:
        """Apply one recorded change."""
        if name in ("create", "open"):
            folder, last = self._folder(path)
            if name == "create":
                folder.change(last, File())
            node = folder.live[last]
            if isinstance(node, File):
                self._handles[values[0]] = node
                if values[1] & os.O_TRUNC and name == "open":
                    node.change(0, None)
        elif name == "write":
            self._handles[values[0]].change(values[1], values[2])
        elif name == "truncate":
            self._handles[values[0]].change(values[1], None)
        elif name == "fsync":
            self._handles[values[0]].sync()
        elif name == "mkdir":
            folder, last = self._folder(path)
            folder.change(last, Folder())
        elif name in ("unlink", "rmdir"):
            folder, last = self._folder(path)
            folder.change(last, None)
        elif name == "rename":
            node, (folder, last), (target, new) = self._node(path), self._folder(path), self._folder(values[0])
            target.change(new, node)
            folder.change(last, None)
        elif name == "sync_folder":
            node = self._node(path)
            assert isinstance(node, Folder)
            node.sync()

    def after_kill(self) -> Tree:
        """The files that the end of the process leaves: all changes."""
        return self._tree(lambda folder: folder.live, lambda file: bytes(file.live))

    def after_loss(self, keep: Keep = lambda: False) -> Tree:
        """The files that a loss of power leaves: what was synced, and of the rest what is kept."""
        return self._tree(lambda folder: folder.after_loss(keep), lambda file: file.after_loss(keep))

    def _tree(self, names: Callable[[Folder], dict[str, File | Folder]], content: Callable[[File], bytes]) -> Tree:
        found: Tree = {}
        contents: dict[int, bytes] = {}

        def add(folder: Folder, above: str) -> None:
            for name, node in sorted(names(folder).items()):
                path = f"{above}{name}"
                if isinstance(node, Folder):
                    found[path] = None
                    add(node, f"{path}/")
                else:
                    found[path] = contents.setdefault(id(node), content(node))

        add(self._top, "")
        return found


class Recorder(Layer):
    """Records the changes of a run to the files below a folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before_it = tree_of(root)
        """The files as they were before the run."""
        self.changes: list[tuple[int, str, str, tuple[Any, ...]]] = []
        """(number of the operation, its name, its path, what else says what it changed)."""

    def after(self, name: str, path: Path, *values: Any) -> None:
        shown = self._shown(path)
        if shown.startswith("/"):
            return
        if name in ("create", "open", "write", "truncate", "fsync"):
            values = (values[0].number, *values[1:])
        elif name == "rename":
            values = (self._shown(values[0]),)
        self.changes.append((len(self.operations) - 1, name, shown, values))

    def disks(self) -> Iterator[tuple[int, Disk]]:
        """The disk before each operation, and after the last; one object, which changes from step to step."""
        disk, changes = Disk(self.before_it), iter([*self.changes, (len(self.operations), "", "", ())])
        number, name, path, values = next(changes)
        for at in range(len(self.operations) + 1):
            while number < at:
                disk.apply(name, path, values)
                number, name, path, values = next(changes)
            yield at, disk


def tree_of(root: Path) -> Tree:
    """The files below a folder."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }


def write_tree(root: Path, tree: Tree) -> None:
    """Write files below a folder."""
    root.mkdir(parents=True, exist_ok=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir(exist_ok=True)
        else:
            (root / path).write_bytes(content)
