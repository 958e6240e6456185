"""Each folder imports only the folders below it, and the import graph stays small."""

from __future__ import annotations

from pathlib import Path

from tests.cases import each
from tests.docs.import_graph import (
    PACKAGE,
    imported_names,
    layers,
    loose_files,
    module_files,
    node_of,
    nodes,
    rooms,
    single_importers,
)

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "library_settings": set(),
    "user_cache": set(),
    "demo": set(),
    "request": {"errors"},
    "config": {"errors", "request"},
    "gguf": {"errors"},
    "kernels": set(),
    "plan": {"request"},
    "text": {"errors", "library_settings", "request", "gguf"},
    "media": {"errors", "request"},
    "tables": {"errors", "request"},
    "data": {"errors", "library_settings", "request", "config", "tables"},
    "models": {"errors", "library_settings", "user_cache", "request", "gguf", "kernels"},
    "engine": {"errors", "demo", "request", "config", "kernels", "plan", "text", "media", "tables", "models"},
    "__init__": {"errors", "library_settings", "request", "data", "engine"},
    "job": {
        "errors", "library_settings", "user_cache", "request", "config", "kernels", "plan", "text", "media", "data",
        "demo", "models", "engine", "__init__",
    },
    "bench": {
        "errors", "library_settings", "user_cache", "request", "config", "kernels", "plan", "text", "media", "data",
        "demo", "models", "engine", "__init__",
    },
    "lm_eval": {"errors", "request", "engine", "__init__"},
    "ray": {"errors", "library_settings", "request", "config", "tables", "data", "job"},
    "cli": {"errors", "library_settings", "request", "config", "models", "engine", "data", "job", "bench", "__init__"},
    "__main__": {"cli"},
}  # fmt: skip
"""Folder, or module of the package's root -> those that it may import."""

NOT_IMPORTED = {
    "request": {"torch", "pyarrow", "transformers"},
    "config": {"torch", "pyarrow", "transformers"},
    "media": {"torch", "pyarrow", "transformers"},
    "plan": {"torch", "pyarrow", "transformers"},
    "gguf": {"torch", "pyarrow", "transformers"},
    "text": {"pyarrow"},
    "data": {"torch", "transformers"},
    "tables": {"torch", "transformers"},
    "engine": {"pyarrow"},
    "models": {"pyarrow"},
    "kernels": {"pyarrow", "transformers"},
}
"""Folder -> libraries that none of its modules may import."""


def test_every_node_is_known() -> None:
    assert nodes().keys() == ALLOWED.keys()


@each("module, path", module_files().items())
def test_imports_go_down(module: str, path: Path) -> None:
    node = node_of(module)
    for name in imported_names(path):
        library = name.split(".")[0]
        assert library not in NOT_IMPORTED.get(node, set()), f"{path.name} imports {name}"
        assert library != "vllm_flash_attn" or node == "kernels", f"{path.name} imports {name}"
        if library == PACKAGE.name:
            assert node_of(name) in ALLOWED[node] | {node}, f"{path.name} imports {name}"


def test_the_graph_is_small() -> None:
    assert len(nodes()) <= 24
    assert len(layers()) <= 10


@each("node", sorted(nodes().keys() - {"kernels"}))
def test_rooms_of_a_node_import_no_circle(node: str) -> None:
    layers(rooms(node))


def test_folders_have_few_loose_files() -> None:
    """In `kernels` and `plan` a file is an operation or an idea."""
    assert {name for name, count in loose_files().items() if count > 15} <= {"kernels", "kernels/gpu", "plan"}


def test_few_modules_have_one_importer() -> None:
    assert len(single_importers()) <= 75
