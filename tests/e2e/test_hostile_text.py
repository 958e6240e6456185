"""No command writes a character to a terminal or a pipe that controls it, reorders its text or hides in it.

Rows, file names, options, models, processors and locks hold all of them; results files hold them as they are.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.option_types import BOOL
from batchgen.config.run_config import OPTIONS
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run

HOSTILE = "".join(
    map(
        chr,
        [
            *(c for c in range(0x20) if c not in (0x09, 0x0A)),  # C0, ESC among them
            *range(0x7F, 0xA0),  # DEL, C1
            *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # direction
            *(0x2028, 0x2029),  # separators
            *(0x00AD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF),  # no width
            *(0xE0001, 0xE0041),  # tags
        ],
    )
)
SEQUENCE = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\x9b31m"
TEXT = f"a{SEQUENCE}{HOSTILE}b\nerror: injected"
NAME = "n\x07\x1b]0;t\x1b[8m\x7f\x9b\u202e\u2067\u2028\u200b\ufeff\U000e0041\nerror: injected\udce9"
"""What a file name can hold, with a byte that is not UTF-8."""
ARGUMENT = TEXT.replace("\0", "")
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[hl]|\x1b\[(?:1A|2K)|\r(?=\x1b)")
"""Sequences of our own display: colours, the cursor, erased lines."""
QUICK = ["--max-new-tokens", "2", "--temperature", "0", "--dtype", "float32", "--attention", "torch"]


def rows() -> list[Any]:
    line = {"custom_id": TEXT, "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "*", "messages": [{"role": "user", "content": "Hello"}]}
    return [
        {"id": f"ok{TEXT}", "text": TEXT, "echo": True, "stream": True, f"key{TEXT}": TEXT, "max_new_tokens": 4},
        {"id": "ok", "text": "Hello", "stream": True, f"max_new_token{HOSTILE}": 3, "Temprature": TEXT, "column": TEXT},
        {"text": "Hello", "stop": [TEXT], "stream": True},
        {"text": "Hello", "sampling_params": {f"temprature{TEXT}": 1}},
        {"text": "Hello", "sampling_params": {TEXT: 1}},
        {"text": "Hello", "temperature": TEXT},
        {"text": "Hello", "json_schema": {"type": TEXT}},
        {"text": "Hello", "json_schema": {TEXT: TEXT, "$ref": TEXT}},
        {"text": "Hello", "regex": f"({TEXT}"},
        {"text": "Hello", "ebnf": TEXT},
        {"text": "Hello", "lora_path": TEXT},
        {"text": "Hello", "custom_logit_processor": TEXT},
        {"text": "Hello", "custom_logit_processor": "bad"},
        {"text": "Hello", "return_hidden_states": {TEXT: 1}},
        {"messages": [{"role": TEXT, "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": TEXT}]}]},
        {"input_embeds": f"{TEXT}.safetensors"},
        {"prompt": "Hello", "text": TEXT, "id": TEXT},
        {"id": f"ok{TEXT}", "text": "again"},
        {**line, "body": body},
        {**line, "body": {**body, TEXT: 1}},
        {**line, "body": {**body, "model": TEXT}},
        {**line, "url": TEXT, "body": body},
        {**line, "method": TEXT, "body": body},
        b'{"text": "\x1b[8m\x07\xc2\x9b\xe2\x80\xae", "' + HOSTILE.encode() + b'": \xff',
        b'{"text": "\\ud800", "id": "\\u001b\\u009b\\u202e"}',
    ]


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hostile inputs, configurations and models."""
    folder = tmp_path_factory.mktemp("hostile")
    write_lines(folder / f"{NAME}.jsonl", rows())
    (folder / "mine.py").write_text(f"def bad(logits, rows):\n    raise ValueError({TEXT!r})\n")
    toml = json.dumps(re.sub("[\x7f\U000e0000-\U000e007f]", "", TEXT))
    (folder / "key.toml").write_text(f"{toml} = 1\n")
    (folder / "value.toml").write_text(f"dtype = {toml}\n")
    (folder / "wrong.toml").write_bytes(f"a = {TEXT}\n".encode())
    (folder / NAME).mkdir()
    shutil.copytree(model, folder / "template")
    template = "{{ raise_exception(" + json.dumps(TEXT) + ") }}"
    (folder / "template" / "chat_template.jinja").write_text(template)
    for number, change in enumerate(
        ({"model_type": TEXT, "architectures": [TEXT]}, {"torch_dtype": TEXT}, {"rope_scaling": {"rope_type": TEXT}})
    ):
        shutil.copytree(model, folder / f"model{number}{NAME}")
        file = folder / f"model{number}{NAME}" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    shutil.copytree(model, folder / f"broken{NAME}")
    (folder / f"broken{NAME}" / "tokenizer.json").write_bytes(HOSTILE.encode())
    (folder / "one.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return folder


def job_commands(model: Path) -> Iterator[list[Any]]:
    """Command lines that read the hostile rows, in the order of a user's work."""
    job = [f"{NAME}.jsonl", "--model", model, *QUICK, "--include-prompt", "--logit-processor", "bad=mine:bad"]
    out = ["-o", f"{NAME}.parquet"]
    yield ["check", *job, "--events", "-"]
    yield ["check", *job, "--events", "-", "--json"]
    yield ["check", *job, "--events", "-", "--strict-fields", "--report", "-"]
    yield ["check", *job, "--carry", f"column,{HOSTILE}", "--on-bad-row", "fail"]
    yield ["run", *job, *out, "--max-errors", "1", "--events", "-"]
    yield ["show", f"{NAME}.parquet"]
    yield ["run", *job, *out, "--progress", "json", "--events", "-", "--report", f"{NAME}.json", "--overwrite"]
    yield ["run", *job, *out, "--events", "-"]
    yield ["run", *job, *out, "--events", f"{NAME}.events", "--retry-errors", "--max-time", "0"]
    yield ["show", f"{NAME}.parquet", "--limit", "0"]
    yield ["show", f"{NAME}.parquet", "--errors", "--finished"]
    yield from (["show", f"{NAME}.parquet", "--finished", "--row", row] for row in range(len(rows()) + 1))
    yield ["export", f"{NAME}.parquet", "--format", "jsonl", "-o", "-"]
    yield ["export", f"{NAME}.parquet", "--format", "openai-batch", "-o", "-"]
    yield ["export", f"{NAME}.parquet", "--format", "openai-batch", "--overwrite"]
    yield ["export", f"{NAME}.parquet", "--format", "openai-batch", "-o", f"{NAME}.parquet", "--overwrite"]
    yield ["verify", f"{NAME}.parquet", "--rows", "4", "--logit-processor", "bad=mine:bad"]
    yield ["run", *job, "-o", "lines.jsonl", "--events", "-", "--overwrite"]
    yield ["run", f"{NAME}.jsonl", "--model", model, *QUICK, "-o", f"{NAME}.parquet", "--events", "-"]
    yield ["merge", f"{NAME}.parquet", "-o", f"{NAME}.all.parquet", "--overwrite"]
    yield ["merge", f"{NAME}.parquet", f"{NAME}.all.parquet", "-o", f"{NAME}.two.parquet"]


def wrong_commands(model: Path) -> Iterator[list[Any]]:
    """Command lines that are refused, with hostile words in every place."""
    for words in ([], ["run"], ["show"], ["export"], ["verify"], ["help"], ["bench"], ["check"]):
        yield [*words, ARGUMENT]
        yield [*words, f"--{ARGUMENT}"]
    for option in OPTIONS:
        if option.value_type is not BOOL and not option.choice_flags and option.target != "meta":
            words = {"lora": f"{ARGUMENT}={ARGUMENT}", "logit_processor": f"{ARGUMENT}=os:{ARGUMENT}"}
            yield ["run", "gone.jsonl", option.flags[0], words.get(option.name, ARGUMENT)]
    yield ["run", "one.jsonl", "--logit-processor", "x=mine:gone"]
    yield from (["run", "one.jsonl", "--config", name] for name in ("key.toml", "value.toml", "wrong.toml", NAME))
    for name in ("template", f"broken{NAME}", NAME, *(f"model{number}{NAME}" for number in range(3))):
        yield ["run", "one.jsonl", "--model", name, *QUICK, "-o", f"{name}.parquet"]
    yield ["run", "one.jsonl", "--model", model, "--lora", f"x={NAME}"]
    yield ["run", f"{NAME}.gone", "--model", model]
    yield ["run", f"{NAME}*", "--model", model, "-o", "x.parquet"]
    yield ["run", NAME, "--model", model]
    yield ["run", "one.jsonl", "--model", model, "-o", f"{NAME}/x/y.parquet"]
    yield ["run", "one.jsonl", "--model", model, "--report", NAME]
    yield ["run", "one.jsonl", "--model", model, "--events", NAME, "--stream"]
    for command in ("show", "verify"):
        yield from ([command, name] for name in (NAME, f"{NAME}.gone", f"{NAME}.jsonl"))
    yield ["merge", NAME, f"{NAME}.gone", "-o", "x.parquet"]
    yield ["export", f"{NAME}.jsonl", "--format", ARGUMENT]
    yield ["export", f"{NAME}.jsonl", "--format", "jsonl"]


def assert_clean(text: str, words: list[Any], terminal: bool) -> None:
    seen = OWN.sub("", text) if terminal else text
    raw = sorted({hex(ord(c)) for c in seen if c in HOSTILE or 0xD800 <= ord(c) < 0xE000})
    assert not raw, f"{words[:3]} wrote {raw}: {seen!r}"
    assert not re.search(r"^error: injected", seen, re.M), f"{words[:3]} wrote a line of a row: {seen!r}"


@pytest.mark.parametrize("terminal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["pipe", "terminal"])
def test_every_stream_of_every_command(folder: Path, model: Path, terminal: bool) -> None:
    """Also where the command is refused or fails; none of them is an internal error."""
    for words in (*job_commands(model), *([] if terminal else wrong_commands(model))):
        done = run(words, folder, expect=None, terminal=terminal)
        assert done.code != 1, f"{words}: {done.stderr}"
        for stream in (done.stdout, done.stderr):
            assert_clean(stream, words, terminal)
        shutil.rmtree(folder / f"{NAME}.two.parquet", ignore_errors=True)


def test_hostile_variables(folder: Path) -> None:
    for env in ({"BATCHGEN_DTYPE": ARGUMENT}, {f"BATCHGEN_X{ARGUMENT}": "1"}, {"BATCHGEN_STOP": f"[{ARGUMENT}"}):
        assert_clean(run(["run", "one.jsonl"], folder, expect=2, env=env).stderr, [env], terminal=False)


def test_a_lock_of_a_hostile_host(folder: Path, model: Path) -> None:
    work = folder / "held.parquet.work"
    work.mkdir()
    with (work / "lock").open("w") as lock:
        json.dump({"pid": 1, "host": TEXT, "start": TEXT}, lock)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = ["run", "one.jsonl", "--model", model, *QUICK, "-o", "held.parquet"]
        done = run(words, folder, expect=5)
    assert "another run" in done.stderr
    assert_clean(done.stderr, words, terminal=False)


def test_json_on_stdout_has_the_values_of_the_results(folder: Path, model: Path) -> None:
    """Escapes change no value, and results hold the text as it is."""
    write_lines(folder / "whole.jsonl", [rows()[0]])
    run(["run", "whole.jsonl", "--model", model, *QUICK, "--events", "e.jsonl"], folder)
    (row,) = rows_of(folder / "whole.out.parquet")
    assert row["id"] == f"ok{TEXT}"
    assert row["text"].startswith(TEXT)
    assert json.loads(row["extra"]) == {f"key{TEXT}": TEXT}
    shown = json.loads(run(["show", "whole.out.parquet", "--row", "0"], folder).stdout)
    line = json.loads(run(["export", "whole.out.parquet", "--format", "jsonl", "-o", "-"], folder).stdout)
    assert shown["id"] == line["id"] == row["id"]
    assert shown["text"] == line["text"] == row["text"]
    assert line["extra"] == json.loads(row["extra"])
    events = ["run", "whole.jsonl", "--model", model, *QUICK, "--overwrite", "--events", "-"]
    ids = {json.loads(event)["id"] for event in run(events, folder).stdout.splitlines()}
    assert (
        ids == {json.loads(event)["id"] for event in (folder / "e.jsonl").read_text().split("\n")[:-1]} == {row["id"]}
    )
