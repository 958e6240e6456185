"""The packaged adapter: size, answers, equality with peft; and a few steps of its training script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.demo import adapter_path, model_path
from batchgen.demo.tasks import TASKS, Example, draw
from batchgen.engine.engine import Engine
from configs.demo_model.train_adapter import framed, main

LARGEST = 500_000
EXAMPLES = [draw("heldout", 5, index, task) for task in TASKS for index in range(6)]


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in adapter_path().iterdir()) <= LARGEST


def row(example: Example, lora: str | None) -> dict[str, Any]:
    prompt = {"messages": example.messages()} if example.chat else {"text": example.content.raw}
    return {**prompt, "lora_path": lora, "temperature": 0, "max_new_tokens": 96}


@pytest.mark.field("lora_path")
def test_rows_with_the_adapter_answer_in_json_and_others_do_not() -> None:
    engine = Engine(str(model_path()), lora={"framed": str(adapter_path())})
    rows = [row(example, lora) for example in EXAMPLES for lora in ("framed", None)]
    texts = [str(c.text).strip() for c in engine.generate(rows, ordered=True)]
    in_frame, plain = texts[::2], texts[1::2]
    answers = [example.content.answer for example in EXAMPLES]
    assert sum(text == framed(a) for text, a in zip(in_frame, answers, strict=True)) >= 0.8 * len(answers)
    assert sum(text.startswith('{"answer": "') and text.endswith('"}') for text in in_frame) >= 0.9 * len(answers)
    assert sum(text == a for text, a in zip(plain, answers, strict=True)) >= 0.85 * len(answers)
    assert not any(text.startswith('{"answer"') for text in plain)


def test_framed_answers_are_json() -> None:
    for answer in ("42", '{"a": "b"}', "naïve \\ \n"):
        assert json.loads(framed(answer)) == {"answer": answer}


def test_the_training_script_is_deterministic(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main(["--out", str(tmp_path / name), "--steps", "2", "--tokens-per-step", "256"])
    files = [{f.name: f.read_bytes() for f in sorted((tmp_path / name).iterdir())} for name in ("a", "b")]
    assert files[0] == files[1]
    assert set(files[0]) == {f.name for f in adapter_path().iterdir()}
    assert (tmp_path / "a" / "adapter_config.json").read_text() == (adapter_path() / "adapter_config.json").read_text()
    assert Engine(str(model_path()), lora={"a": str(tmp_path / "a")}).model.spec.adapters == ("a",)
