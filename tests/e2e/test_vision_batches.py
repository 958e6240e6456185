"""Batch files with pictures, in the forms that OpenAI, Azure and vLLM document, from the file to OpenAI's results."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat import ChatCompletion
from PIL import Image

from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import run
from tests.engine.media.test_media_models import greedy
from tests.media.samples import pixels, saved
from tests.models.tiny_media import save_media

FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
TOKENS = 5
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM = {"role": "system", "content": "You name what a picture shows."}


def url(form: str, seed: int) -> str:
    """A picture as a data URL."""
    data = saved(pixels(seed=seed, size=(40, 30)), form)
    return f"data:{FORMATS[form]};base64,{base64.b64encode(data).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(where: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": where, **more}}


def line(number: int, path: str, *content: Any, **body: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": list(content)}]
    return {"custom_id": f"task-{number}", "method": "POST", "url": path, "body": {"messages": messages, **body}}


CAPTION = {"model": "gpt-4o-mini", "temperature": 0, "max_tokens": TOKENS}
DEPLOYMENT = {"model": "my-deployment", "temperature": 0, "max_tokens": TOKENS}
LOCAL = {"model": "llava-hf/llava-1.5-7b-hf", "temperature": 0, "max_completion_tokens": TOKENS}
FILES: dict[str, list[dict[str, Any]]] = {
    "OpenAI, a caption for each data URL": [
        line(number, "/v1/chat/completions", text("Title: a thing"), picture(url(form, number)), **CAPTION)
        for number, form in enumerate(FORMATS)
    ],
    "Azure, several parts in a message": [
        line(0, "/chat/completions", text("Describe this picture:"), picture(url("PNG", 1)), **DEPLOYMENT),
        line(
            1,
            "/chat/completions",
            text("The first"),
            picture(url("PNG", 1)),
            text("and the second"),
            picture(url("JPEG", 2)),
            text("differ in"),
            **DEPLOYMENT,
        ),
        line(2, "/chat/completions", picture(url("PNG", 1)), picture(url("PNG", 1)), text("Equal?"), **DEPLOYMENT),
        line(3, "/chat/completions", text("No picture at all"), **DEPLOYMENT),
    ],
    "vLLM, detail and parts of responses": [
        *(
            line(number, "/v1/chat/completions", picture(url("PNG", 3), detail=detail), text("What is it?"), **LOCAL)
            for number, detail in enumerate(("low", "high", "auto"))
        ),
        line(
            3,
            "/v1/chat/completions",
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": url("PNG", 3), "detail": "auto"},
            **LOCAL,
        ),
        line(4, "/v1/chat/completions", {"type": "input_text", "text": "No picture at all"}, **LOCAL),
    ],
}
"""What a file shows -> its lines."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("llava")
    model, processor = save_media("llava", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, model, processor


def library_inputs(processor: Any, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What the library makes of the pictures and texts of a line."""
    said, pictures = "", []
    for message in messages:
        said += f"{message['role']}: "
        for part in [text(message["content"])] if isinstance(message["content"], str) else message["content"]:
            said += part.get("text", "<image>")
            if "image_url" in part:
                where = part["image_url"]["url"] if part["type"] == "image_url" else part["image_url"]
                pictures.append(Image.open(io.BytesIO(base64.b64decode(where.partition(",")[2]))).convert("RGB"))
        said += "\n"
    options: dict[str, Any] = {"images": [pictures]} if pictures else {}
    return dict(processor(text=[said + "assistant: "], return_tensors="pt", **options))


@pytest.mark.field("body", "messages")
@pytest.mark.parametrize("name", FILES)
def test_documented_files_run_unchanged(name: str, llava: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, model, processor = llava
    lines = FILES[name]
    write_lines(tmp_path / "batch.jsonl", lines)
    options = ["--model", folder, "--dtype", "float32", "--served-model-name", lines[0]["body"]["model"]]
    run(["run", "batch.jsonl", "-o", "out.parquet", *options], tmp_path)
    run(["export", "out.parquet", "--format", "openai-batch"], tmp_path)
    results = [json.loads(each) for each in (tmp_path / "out.openai.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
    rows = rows_of(tmp_path / "out.parquet")
    for given, row, result in zip(lines, rows, results, strict=True):
        body = ChatCompletion.model_validate(result["response"]["body"], strict=True)
        inputs = library_inputs(processor, given["body"]["messages"])
        ids, _, settled = greedy(model, inputs)
        assert (row["output_ids"][:settled], len(row["output_ids"])) == (ids[:settled], TOKENS)
        assert body.choices[0].message.content == row["text"]
        assert body.usage is not None
        assert body.usage.prompt_tokens == inputs["input_ids"].shape[1]
        details = result["response"]["body"]["usage"].get("prompt_tokens_details") or {}
        assert details.get("media_tokens", 0) == int((inputs["input_ids"] == 257).sum())
