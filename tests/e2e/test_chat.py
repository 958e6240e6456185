"""Conversations through the command, compared with the chat template as transformers renders it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run
from tests.text.conftest import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
BEGUN = [*HELLO, {"role": "assistant", "content": "Well, I"}]

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"messages": HELLO}, {"add_generation_prompt": True}),
    "tools": ({"messages": HELLO, "tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
    "kwargs": (
        {"messages": HELLO, "chat_template_kwargs": {"mood": "calm"}},
        {"mood": "calm", "add_generation_prompt": True},
    ),
    "no new turn": ({"messages": HELLO, "add_generation_prompt": False}, {}),
    "continued": ({"messages": BEGUN, "continue_final_message": True}, {"continue_final_message": True}),
    "parts": ({"messages": PARTS}, {"add_generation_prompt": True}),
}
"""Name -> (the row's fields, arguments of `apply_chat_template`)."""


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a template that reads tools, content parts and an additional variable."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.field("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
def test_prompts_equal_those_of_transformers(chat_model: Path, tmp_path: Path) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    lines: list[dict[str, Any]] = [{"id": name, **row, **greedy} for name, (row, _) in ROWS.items()]
    bodies = [{"model": "*", **row, "temperature": 0, "max_tokens": 6, "ignore_eos": True} for row, _ in ROWS.values()]
    lines += [
        {"custom_id": f"{name}, batch", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in zip(ROWS, bodies, strict=True)
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(chat_model))
    expected = {}
    for name, (row, options) in ROWS.items():
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **options)
        expected[name] = (text, tokenizer(text, add_special_tokens=False)["input_ids"])
        lines.append({"id": f"{name}, ids", "input_ids": expected[name][1], **greedy})
    source = write_lines(tmp_path / "in.jsonl", lines)
    options = ["--include-prompt", "--include-prompt-ids", "--dtype", "float32"]
    run(["run", source, "--model", chat_model, "-o", "out.parquet", *options], tmp_path)
    found = {row["id"]: row for row in rows_of(tmp_path / "out.parquet")}
    assert len({text for text, _ in expected.values()}) == len(ROWS), "each option changes the prompt"
    for name, (text, ids) in expected.items():
        for row in (found[name], found[f"{name}, batch"]):
            assert (row["prompt"], row["prompt_ids"]) == (text, ids), name
            assert row["output_ids"] == found[f"{name}, ids"]["output_ids"]
