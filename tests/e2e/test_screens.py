"""What a newcomer sees in a real terminal, of 80 and of 60 columns: whole words, no line cut, and no traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchgen.demo.tasks import rows as task_rows
from tests.e2e.rows import write_lines

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")


class Terminal:
    """A terminal of tmux, with a shell whose prompt is `$ `."""

    def __init__(self, folder: Path, columns: int, lines: int) -> None:
        self._server = ["tmux", "-S", str(folder / "tmux.socket"), "-f", "/dev/null"]
        program = folder / "batchgen"
        program.write_text(f"#!{sys.executable}\nfrom batchgen.cli.app import main\nmain()\n")
        program.chmod(0o755)
        removed = {"COLUMNS", "LINES", "NO_COLOR", "PAGER", "LESS", "TMUX"}
        env = {name: value for name, value in os.environ.items() if name not in removed}
        env |= {"PATH": f"{folder}:{env['PATH']}", "PYTHONPATH": str(ROOT), "PS1": "$ ", "OMP_NUM_THREADS": "1"}
        size = ["-x", str(columns), "-y", str(lines)]
        command = ["new-session", "-d", *size, "exec env 'PS1=$ ' bash --norc --noprofile"]
        subprocess.run([*self._server, *command], cwd=folder, env=env, check=True)
        self._tmux("set-option", "-g", "history-limit", "5000")

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._server, *words], capture_output=True, text=True, check=True).stdout

    def keys(self, *keys: str) -> None:
        """Type keys, as tmux names them."""
        self._tmux("send-keys", *keys)

    @property
    def screen(self) -> list[str]:
        """The lines of the screen, without empty ones at the end."""
        return self._tmux("capture-pane", "-p").rstrip().splitlines()

    def wait(self, condition: Callable[[list[str]], object]) -> list[str]:
        """The screen once it meets a condition."""
        end = time.monotonic() + SECONDS
        while not condition(self.screen):
            assert time.monotonic() < end, "\n".join(self.screen)
            time.sleep(0.05)
        return self.screen

    def run(self, words: str, code: int = 0) -> list[str]:
        """Run a command to its end with this exit code; all lines that it left on the terminal."""
        self.keys("clear", "Enter")
        self.wait(lambda screen: screen == ["$"])
        self._tmux("clear-history")
        self._tmux("send-keys", "-l", f'clear; {words}; echo "exit code $?"')
        self.keys("Enter")
        self.wait(lambda screen: any(re.fullmatch(r"exit code \d+", line) for line in screen))
        lines = self._tmux("capture-pane", "-p", "-S", "-").rstrip().splitlines()
        begin = max(i for i, line in enumerate(["", *lines]) if line.startswith("$ clear;") or not i)
        end = lines.index(f"exit code {code}")
        return [line.rstrip() for line in lines[begin:end]]

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, *getattr(request, "param", (80, 24)))
    yield made
    made.close()


@pytest.mark.parametrize("terminal", [(80, 24), (60, 20)], indirect=True)
def test_the_first_job(terminal: Terminal, tmp_path: Path) -> None:
    rows = [*task_rows("heldout", 40)]
    rows[3] |= {"top_p": 7}
    write_lines(tmp_path / "in.jsonl", rows)
    text = " ".join(terminal.run("batchgen run -h"))
    assert "--help all" in text
    lines = terminal.run("batchgen check in.jsonl --model demo")
    assert "rows            40 (ok 39, errors 1)" in lines
    assert "errors          invalid_field 1" in lines
    assert not any(line.startswith(("starting", "reading", "planning")) for line in lines), "the display is removed"
    lines = terminal.run("batchgen run in.jsonl --model demo -o out.parquet")
    labels = [line[:12].rstrip() for line in lines if not line.startswith(" ")]
    assert labels[:4] == ["output", "rows", "prompt", "first answer"]
    assert "batchgen show out.parquet --errors" in " ".join(" ".join(lines).split())
    lines = terminal.run("batchgen show out.parquet --no-pager")
    assert lines[0].split() == ["row", "id", "outcome", "text"]
    assert lines[-1].startswith("40 samples, 1 errors (20 more")
    lines = terminal.run("batchgen show out.parquet --where status=error --columns id,error.code,error.param")
    assert [line.split() for line in lines[:2]] == [
        ["id", "error.code", "error.param"],
        ["extract-0003", "invalid_field", "top_p"],
    ]
    refused = " ".join(terminal.run("batchgen show out.parquet --where statu=ok", code=2))
    assert "did you mean `status`?" in " ".join(refused.split())


def test_a_long_list_is_read_in_the_pager(terminal: Terminal, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": f"Reverse: a b {i}", "max_new_tokens": 3} for i in range(60)])
    terminal.run("batchgen run in.jsonl --model demo -o out.parquet")
    terminal.keys("clear; batchgen show out.parquet --limit 0; echo left", "Enter")
    first = terminal.wait(lambda screen: screen[-1:] == [":"])
    assert first[0].split() == ["row", "id", "outcome", "text"]
    terminal.keys("G")
    terminal.wait(lambda screen: any("60 samples, 0 errors" in line for line in screen))
    terminal.keys("q")
    terminal.wait(lambda screen: "left" in screen)
    lines = terminal.run("batchgen show out.parquet --limit 0 --no-pager")
    assert len(lines) == 62
    assert len(terminal.run("batchgen show out.parquet --limit 3")) == 5, "what fits the screen is not paged"
    terminal.keys("clear; batchgen run --help all", "Enter")
    assert terminal.wait(lambda screen: screen[-1:] == [":"])[0].startswith("Usage: batchgen run")
    terminal.keys("q")


def test_a_job_is_followed(terminal: Terminal, tmp_path: Path) -> None:
    rows = [{"text": f"Reverse: a b {i}", "max_new_tokens": 40, "ignore_eos": True} for i in range(200)]
    write_lines(tmp_path / "in.jsonl", rows)
    options = "--max-num-seqs 8 --commit-every 20 --progress none"
    job = f"batchgen run in.jsonl --model demo -o out.parquet {options} 2> log.txt &"
    terminal.keys(f"{job} while [ ! -d out.parquet.work ]; do sleep 0.1; done", "Enter")
    terminal.wait(lambda _: (tmp_path / "out.parquet.work").exists() or (tmp_path / "out.parquet").exists())
    lines = terminal.run("batchgen show out.parquet --follow")
    shown = sorted(int(line.split()[0]) for line in lines if line.split()[2:3] == ["length"])
    assert shown == [*range(200)]


@pytest.mark.parametrize("environment", ["NO_COLOR=1", "TERM=dumb"])
def test_without_colours(environment: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"text": "Reverse: a b c", "max_new_tokens": 3}])
    name, _, value = environment.partition("=")
    env = os.environ | {"TERM": "xterm", "PAGER": "cat", "PYTHONPATH": str(ROOT), name: value}
    for words in ("check in.jsonl", "run in.jsonl --model demo", "show in.out.parquet", "help resume"):
        command = f"{shlex.quote(sys.executable)} -m batchgen {words}"
        script = ["script", "-qec", command, "log.txt"]
        subprocess.run(script, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        text = (tmp_path / "log.txt").read_text(errors="replace")
        assert not re.search(r"\x1b\[(?:\d;)?(3[0-7]|9[0-7])m", text), words
        assert "Traceback" not in text


def test_init_and_help(terminal: Terminal, tmp_path: Path) -> None:
    lines = " ".join(terminal.run("batchgen init"))
    assert lines.startswith("batchgen.toml is written")
    assert (tmp_path / "batchgen.toml").exists()
    assert "is kept" in " ".join(terminal.run("batchgen init", code=2))
    lines = terminal.run("batchgen help kill power")
    assert any(line.startswith("resume: ") for line in lines)
    lines = terminal.run("batchgen run --help seed")
    assert any(line.strip().startswith("--seed N") for line in lines)


def test_outside_a_terminal_everything_is_plain(tmp_path: Path) -> None:
    """A log has no escapes, says what happens before the first step, and wraps no path."""
    write_lines(tmp_path / "in.jsonl", [{"text": "Reverse: a b c", "max_new_tokens": 3}])
    words = [sys.executable, "-m", "batchgen", "run", "in.jsonl", "--model", "demo"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert "no --model given" not in done.stderr, "demo is named"
    phases = [line for line in lines if line in ("reading", "loading", "planning")]
    assert phases == ["reading", "loading", "planning"]
    assert lines.index("planning") < next(i for i, line in enumerate(lines) if line.startswith("generating: "))
    shown = [sys.executable, "-m", "batchgen", "show", "in.out.parquet", "--row", "0", "--columns", "id,text"]
    done = subprocess.run(shown, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["id"] == "row-0"
