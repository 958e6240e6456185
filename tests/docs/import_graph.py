"""The package's import graph: `python -m tests.docs.import_graph` prints its layers, its rooms and single importers.

A node is a folder directly below the package, or a module of the package's root. An edge goes from a node to each node
that it imports, imports inside functions included. The layer of a node is the length of the longest way down from it. A
room is a folder inside a node, or a module that lies loose in it.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "batchgen"
_NAME = PACKAGE.name


@cache
def module_files() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Dotted names of the modules that a file imports, or imports names from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what it imports"
            module = node.module or ""
            names = (f"{module}.{alias.name}" for alias in node.names)
            found.update(name if name in module_files() else module for name in names)
    return frozenset(found)


@cache
def _imports() -> dict[str, frozenset[str]]:
    """Module -> modules of the package that it imports."""
    files = module_files()
    return {name: frozenset(imported_names(path) & files.keys() - {name}) for name, path in files.items()}


def node_of(module: str) -> str:
    """The node that a module belongs to: `batchgen.plan.tree` -> `plan`, `batchgen` -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def nodes() -> dict[str, set[str]]:
    """Node -> the nodes that it imports."""
    return _graph(_imports(), node_of)


def _graph(imports: Mapping[str, Iterable[str]], place: Callable[[str], str]) -> dict[str, set[str]]:
    """Place -> the other places that its modules import."""
    found: dict[str, set[str]] = {place(module): set() for module in imports}
    for module, imported in imports.items():
        found[place(module)] |= {place(name) for name in imported} - {place(module)}
    return found


def rooms(node: str) -> dict[str, set[str]]:
    """Room of a node -> the rooms of the same node that it imports."""
    folders = {name for name, path in module_files().items() if path.stem == "__init__"}
    inside = {
        module: [name for name in imported if node_of(name) == node and name not in folders]
        for module, imported in _imports().items()
        if node_of(module) == node and module not in folders
    }
    return _graph(inside, lambda module: module if module.count(".") <= 2 else module.rpartition(".")[0])


def loose_files() -> dict[str, int]:
    """Folder of the package -> its modules."""
    return Counter(path.parent.relative_to(PACKAGE).as_posix() for path in module_files().values())


def layers(graph: Mapping[str, set[str]] | None = None) -> list[list[str]]:
    """Nodes by layer, the lowest first.

    Args:
        graph: node -> the nodes that it imports; by default that of the package.

    Raises:
        ValueError: nodes import each other in a cycle.
    """
    remaining, found = dict(nodes() if graph is None else graph), []
    placed: set[str] = set()
    while remaining:
        layer = sorted(node for node, imported in remaining.items() if imported <= placed)
        if not layer:
            raise ValueError(f"these nodes import each other: {', '.join(sorted(remaining))}")
        placed.update(layer)
        found.append(layer)
        for node in layer:
            del remaining[node]
    return found


def single_importers() -> dict[str, str]:
    """Module with exactly one importer in the package -> that importer."""
    importers = defaultdict(list)
    for module, imported in _imports().items():
        for name in imported:
            importers[name].append(module)
    return {name: modules[0] for name, modules in sorted(importers.items()) if len(modules) == 1}


def main() -> None:
    """Print the graph."""
    imported = nodes()
    for number, layer in reversed(list(enumerate(layers(), 1))):
        for node in layer:
            print(f"{number:>2}  {node:<18} {' '.join(sorted(imported[node]))}")
    for node in sorted(imported):
        inside = rooms(node)
        if folders := [room for room in inside if module_files()[room].stem == "__init__"]:
            arrows = sum(map(len, inside.values()))
            print(f"{node}: {len(inside)} rooms, of which {len(folders)} folders, {arrows} arrows")
    single = single_importers()
    print(f"{len(module_files())} files, {len(imported)} nodes in {len(layers())} layers")
    print(f"{len(single)} modules with one importer:")
    for module, importer in single.items():
        lines = len(module_files()[module].read_text(encoding="utf-8").splitlines())
        print(f"    {module} ({lines} lines), by {importer}")


if __name__ == "__main__":
    main()
