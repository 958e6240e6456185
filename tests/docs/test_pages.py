"""Every page of the documentation and the README: its snippets run, its links resolve, its topic is listed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.cli.help import TOPICS, page_path, summary_of
from batchgen.demo import adapter_path, model_path
from tests.docs.command_server import write_clients
from tests.docs.snippets import run_snippet, snippets_of
from tests.models.tiny_encoders import add_modules, save_encoder, save_scorer

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "batchgen" / "docs").glob("*.md"))]
PROMPTS = ROOT / "sample_data" / "prompts.jsonl"
_IDS = {"ids": lambda page: page.stem}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of the snippets: `batchgen` on PATH is a client of one command server."""
    folder = tmp_path_factory.mktemp("bin")
    address = folder / "socket"
    values = {**os.environ, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    values["PYTHONPATH"] = f"{ROOT}"
    command = [sys.executable, "-m", "tests.docs.command_server", str(address)]
    with subprocess.Popen(command, cwd=ROOT, env=values, stdin=subprocess.PIPE) as server:
        while not address.exists():
            assert server.poll() is None
            time.sleep(0.05)
        write_clients(folder, address)
        yield values
        assert server.stdin is not None
        server.stdin.close()


def _has_snippets(page: Path) -> bool:
    return any(not snippet.options.get("needs") for snippet in snippets_of(page))


@pytest.mark.parametrize("page", list(filter(_has_snippets, PAGES)), **_IDS)
def test_the_snippets_run(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "Qwen3-0.6B").symlink_to(model_path())
    shutil.copytree(adapter_path(), tmp_path / "adapter")
    if page.stem == "embeddings":
        add_modules(save_encoder("bert", tmp_path / "all-MiniLM-L6-v2"), {"pooling_mode": "mean"}, "Normalize")
        save_scorer("bert", tmp_path / "ms-marco-MiniLM-L6-v2", labels=1)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    for snippet in snippets_of(page):
        run_snippet(snippet, tmp_path, environment)


@pytest.mark.parametrize("page", PAGES, **_IDS)
def test_links_point_to_existing_pages_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else page.parent / name
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page.name} links to {target}"


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_a_topic_with_a_summary() -> None:
    assert sorted(TOPICS) == sorted(page.stem for page in PAGES if page != README)
    for topic in TOPICS:
        assert page_path(topic).read_text(encoding="utf-8").startswith("# ")
        assert 10 < len(summary_of(topic)) <= 90, f"{topic}: {summary_of(topic)}"


def test_every_optional_set_of_packages_is_in_the_page_of_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "batchgen" / "docs" / "install.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(project["optional-dependencies"])
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in page


def test_jobs_that_are_queued_again_keep_their_log() -> None:
    """And nodes without a GPU, which never start a job that asks for one, have a word."""
    found = [(page, snippet) for page in PAGES for snippet in snippets_of(page) if "#SBATCH --requeue" in snippet.text]
    assert {page.stem for page, _ in found} >= {"README", "sharding"}
    for page, snippet in found:
        assert "#SBATCH --open-mode=append" in snippet.text
        assert "nodes without a GPU leave `--gpus=1` out" in " ".join(page.read_text(encoding="utf-8").split())


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 250


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "README.md" in script
    block = re.search(r"<!-- test -->\n```\n(.*?)\n```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    command = block[1]
    assert command.count("\n") == 0
    assert " && OMP_NUM_THREADS=" in command  # .ci/run splits set-up and tests here
    assert "pytest" in command
