"""Pictures and the packaged demonstration model: answers about held-out ones, alone and as the library's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from batchgen import Engine
from batchgen.demo import model_path
from configs.demo_model.pictures import Example, examples, kinds, sample_rows
from tests.e2e.rows import rows_of
from tests.e2e.runner import run

SAMPLE = Path(__file__).parents[2] / "sample_data" / "pictures.jsonl"
COUNT = 240


def messages(example: Example) -> list[dict[str, object]]:
    parts = [{"type": "image", "image": example.image}, {"type": "text", "text": example.question}]
    return [{"role": "user", "content": parts}]


def test_no_held_out_kind_is_trained_on() -> None:
    train, heldout = ({kind for group in kinds(split) for kind in group} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout)
    for name in ("colour", "shape", "count", "digit"):
        assert {getattr(kind, name) for kind in heldout} <= {getattr(kind, name) for kind in train}


def test_questions_about_held_out_pictures_are_answered() -> None:
    asked = list(itertools.islice(examples("heldout", 7), COUNT))
    engine = Engine(model_path(), dtype="float32", max_model_len=256)
    rows = [{"messages": messages(example), "temperature": 0, "max_new_tokens": 40} for example in asked]
    found = [done.text for done in engine.generate(rows, ordered=True)]
    wrong = [(e.question, e.answer, text) for e, text in zip(asked, found, strict=True) if e.answer != text]
    assert len(wrong) <= COUNT // 10, wrong


def test_the_library_answers_alike() -> None:
    asked = list(itertools.islice(examples("heldout", 8), 6))
    model = AutoModelForImageTextToText.from_pretrained(model_path(), dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(model_path())
    engine = Engine(model_path(), dtype="float32", max_model_len=256)
    rows = [{"messages": messages(example), "temperature": 0, "max_new_tokens": 40} for example in asked]
    for example, done in zip(asked, engine.generate(rows, ordered=True), strict=True):
        text = processor.tokenizer.apply_chat_template(messages(example), add_generation_prompt=True, tokenize=False)
        inputs = processor(text=text, images=example.image, add_special_tokens=False, return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == done.text


def test_the_sample_file_is_the_scripts() -> None:
    """But for the bytes of the pictures, which depend on the version of the library that draws them."""
    written = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    made = list(sample_rows(len(written), 5))
    for row in (*written, *made):
        row["messages"][0]["content"][0]["image_url"]["url"] = ""
    assert written == made


def test_the_sample_file(tmp_path: Path) -> None:
    done = run(["run", SAMPLE, "-o", "out.parquet"], tmp_path)
    assert done.code == 0, done.stderr
    found = rows_of(tmp_path / "out.parquet")
    assert [row["status"] for row in found] == ["ok"] * len(SAMPLE.read_text().splitlines())
    assert [row["text"] for row in found] == [json.loads(row["extra"])["expected"] for row in found]
