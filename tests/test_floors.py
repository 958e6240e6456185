"""Imports only go down: every module of a floor imports from the floors it may name, and from nowhere else of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "batchgen"

ALLOWED: dict[str, set[str]] = {
    "": {""},
    "kernels": {"kernels"},
    "plan": {"", "plan"},
    "text": {"", "text"},
    "data": {"", "data"},
    "demo": {"demo"},
    "models": {"", "kernels", "models"},
    "engine": {"", "kernels", "plan", "text", "models", "engine"},
    "job": {"", "kernels", "plan", "text", "data", "demo", "models", "engine", "job"},
    "cli": {"", "kernels", "plan", "text", "data", "demo", "models", "engine", "job", "cli"},
}

# The package's front doors: `import batchgen` hands out the Python API on first use, `python -m batchgen` the commands.
FRONT_DOORS = {ROOT / "__init__.py", ROOT / "__main__.py"}

HEAVY_AND_BANNED = {
    "": {"torch", "pyarrow", "transformers"},
    "plan": {"torch", "pyarrow", "transformers"},
    "text": {"pyarrow"},
    "data": {"torch", "transformers"},
    "engine": {"pyarrow"},
    "models": {"pyarrow"},
    "kernels": {"pyarrow", "transformers"},
}


def floor_of(module_file: Path) -> str:
    parts = module_file.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def imported_modules(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            found.add(node.module or "")
            if node.module == "batchgen":
                found.update(f"batchgen.{alias.name}" for alias in node.names)
    return found


FILES = sorted(p for p in ROOT.rglob("*.py") if p not in FRONT_DOORS)


def test_every_folder_is_a_known_floor() -> None:
    assert {floor_of(p) for p in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    floor = floor_of(path)
    for module in imported_modules(ast.parse(path.read_text())):
        top = module.split(".")[0]
        assert top not in HEAVY_AND_BANNED.get(floor, set()), f"{path.name} imports {module}"
        if top != "batchgen" or module == "batchgen":
            continue
        rest = module.split(".")[1:]
        target = rest[0] if (ROOT / rest[0]).is_dir() else ""
        assert target in ALLOWED[floor], f"floor {floor or 'vocabulary'!r} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_old_flash_package_is_imported_in_one_room(path: Path) -> None:
    modules = imported_modules(ast.parse(path.read_text()))
    assert floor_of(path) == "kernels" or not any(m.startswith("vllm_flash_attn") for m in modules)
