"""`batchgen help`: the list of topics and the pages, for people and for pipes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.cli.app import app, run_command
from batchgen.cli.help import TOPICS, page_path
from batchgen.models.library.model_types import COMPARED
from tests.models.test_media_towers import CASES
from tests.models.tiny_media import FAMILIES
from tests.models.tiny_media_more import MORE, REFUSED

ROOT = Path(__file__).parents[2]


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"    {topic} " in listed for topic in TOPICS)


@pytest.mark.parametrize("topic", ["stops", "hidden-states"])
def test_a_pipe_gets_the_page_as_it_is(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", topic]) == 0
    assert capsys.readouterr().out == page_path(topic).read_text(encoding="utf-8")


def test_the_reference_has_every_command_whatever_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["help", "reference"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^## batchgen (\w+)$", text, re.M) == [command.name for command in app.registered_commands]
    assert "- `--skip-special-tokens, --no-skip-special-tokens`: " in text
    assert text.count("--max-num-seqs N`") == 1, "`check` names what `run` does not have"
    monkeypatch.setenv("COLUMNS", "37")
    assert run_command(["help", "reference"]) == 0
    assert capsys.readouterr().out == text


def test_the_names_of_other_systems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each outcome: what runs, other names of fields, then what is refused."""
    assert run_command(["help", "other-systems"]) == 0
    text = capsys.readouterr().out
    assert "<!--" not in text
    assert "| `--context-length` | `--max-model-len` |\n" in text
    lines = text.split("### SGLang\n\n")[1].split("\n\n")[0].splitlines()
    assert lines[:2] == ["| name | here |", "|---|---|"]
    assert re.fullmatch(r"\| (`\w+`, )+`\w+` \| runs \|", lines[2])
    for row in ("| `rid` | another name of `id` |", "| `sampling_seed` | refused: use `seed` |"):
        assert row in lines
    refused = [line.partition(" | ")[2].startswith("refused") for line in lines[2:]]
    assert refused == sorted(refused)
    assert "| `guided_json` | another name of `json_schema` |\n" in text
    for end in (
        "`verbosity`, `input`, `timeout`, `extra_headers`, `extra_query` | accepted in the body of an OpenAI line |\n",
        "`prompt_cache_retention`, `safety_identifier` | carried in the body of an OpenAI line |\n",
        "| `function_call`, `functions` | refused in the body of an OpenAI line, unless it asks for nothing: use",
    ):
        assert end in text


def test_words_are_searched_in_all_pages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["help", "constraint"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "constraints: Constraints"
    assert max(map(len, lines)) <= 80
    hits = [line.partition(": ") for line in lines if not line.startswith((" ", "...", "Read", "Options"))]
    for topic, _, heading in hits:
        page = page_path(topic).read_text(encoding="utf-8")
        section = re.split(r"^(?=#+ )", page[page.index(f"# {heading}\n") :], flags=re.M)[1]
        assert "constraint" in section.lower()
    assert len(hits) == 12
    assert re.fullmatch(r"\.\.\. and \d+ more sections: add a word to find fewer", lines[-3])
    assert lines[-2] == "Read a page: batchgen help constraints"
    assert re.fullmatch(r"Options about it, \d+: batchgen run --help constraint", lines[-1])
    assert run_command(["help", "requeue", "slurm"]) == 0
    text = capsys.readouterr().out
    assert "sharding: " in text
    assert "requeue" in text


def test_a_comment_of_a_shell_is_not_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "SBATCH"]) == 0
    headings = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert not any(heading.startswith("SBATCH") for heading in headings)


def test_a_word_that_no_page_has_is_refused_with_the_nearest_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["help", "constrants"]) == 2
    assert capsys.readouterr().err == (
        "error: no page has `constrants`. Did you mean `constraints`? `batchgen help` lists the topics.\n"
    )


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_gets_a_rendered_page(columns: int) -> None:
    """No marks of Markdown, no line wider than the terminal, and through the pager."""
    main, child = pty.openpty()
    environment = {**os.environ, "PAGER": "cat", "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "batchgen", "help", "glossary"], cwd=ROOT, env=environment, stdout=child, stderr=child
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(main, 1 << 16)
            except OSError:  # the child has closed its end
                break
    os.close(main)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert any("Glossary" in line for line in lines)
    assert not any(line.startswith(("# ", "|---")) for line in lines)
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("llava", ["llava", "native", "image", "text, of `llama`"]),
        ("Qwen3-VL", ["qwen3_vl", "transformers", "image", "text, of `qwen3_vl_text`"]),
        ("mamba2", ["mamba2", "transformers"]),
        ("bert", ["bert", "no", "BertSelfAttention sees later tokens too, as an encoder does"]),
        ("ctrl", ["ctrl", "transformers"]),
        ("janus", ["janus", "native", "no: its images become tokens of a codebook", "text, of `llama`"]),
        ("idefics2", ["idefics2", "native", "no: its processor changes the text around images", "text, of `mistral`"]),
        ("blip_2", ["blip-2", "transformers", "not compared", "text, of `opt`"]),
        ("qwen3_5", ["qwen3_5", "transformers", "image", "text, of `qwen3_5_text`"]),
        ("phi3", ["phi3", "transformers"]),
        ("lfm2", ["lfm2", "transformers"]),
    ],
)
def test_model_types_are_listed(name: str, row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["models", name]) == 0
    lines = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["type", "runs"]
    assert row in lines


def test_a_model_type_that_no_library_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["models", "nothing-like-it"]) == 2
    assert "`nothing-like-it`" in capsys.readouterr().err


def test_images_and_audio_are_those_that_tests_compare() -> None:
    kinds: dict[str, set[str]] = {}
    for name, family in {**FAMILIES, **MORE}.items():
        kinds.setdefault(family.model_type or name, set()).update(family.kinds)
    for case in CASES:
        kinds.setdefault(case.name, set()).add(case.kind)
    compared = {name: ", ".join(sorted(items, reverse=True)) for name, items in kinds.items()}
    refused = {name: f"no: {family.refused}" for name, family in REFUSED.items()}
    assert {name: words for words, names in COMPARED.items() for name in names.split()} == compared | refused
