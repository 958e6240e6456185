"""Chat templates of models that read images: kept with the processor, and written for content in parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batchgen.demo import model_path
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ c.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_text_is_rendered_by_the_template_of_the_processor(file: str, tmp_path: Path) -> None:
    for path in Path(model_path()).glob("*.json"):
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).template is None
    (tmp_path / file).write_text(json.dumps({"chat_template": PARTS}))
    prompt = ChatPrompt(messages=({"role": "user", "content": "How are you?"},))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.template is not None
    assert tokenizer.render_chat(prompt) == "<user>How are you?"
