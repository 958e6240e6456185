"""`plain_config`: it selects the same tokenizer as the model's full configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen.text.tokens.model_files import plain_config
from batchgen.text.tokens.tokenizer import Tokenizer

CLASSES = [
    "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "Qwen2TokenizerFast", "GPT2TokenizerFast",
    "GemmaTokenizer", "NoSuchTokenizer",
]  # fmt: skip
TYPES = ["llama", "qwen3", "mistral", "gemma2", "gpt2", "deepseek_v3", "no_such_type"]


def make_folder(source: Path, target: Path, tokenizer: dict[str, Any], model: dict[str, Any] | None) -> Path:
    shutil.copytree(source, target)
    path = target / "tokenizer_config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, **tokenizer}))
    if model is not None:
        (target / "config.json").write_text(json.dumps(model))
    return target


def load_result(folder: Path, **options: Any) -> tuple[Any, ...]:
    """Everything that batchgen reads of a loaded tokenizer, or the error of loading it."""
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        return type(error), str(error)
    backend = hf.backend_tokenizer.to_str() if hf.is_fast else None
    return type(hf), hf.is_fast, backend, hf.eos_token_id, hf.bos_token_id, hf.chat_template, hf.special_tokens_map


@pytest.mark.parametrize(
    ("model_type", "kind"), [(name, ("bytelevel", "bytefallback")[at % 2]) for at, name in enumerate(TYPES)]
)
def test_plain_config_selects_the_same_tokenizer(
    folders: dict[str, Path], tmp_path: Path, model_type: str, kind: str
) -> None:
    for name in CLASSES:
        model = {"model_type": model_type, "tokenizer_class": "OtherTokenizer"}
        folder = make_folder(folders[kind], tmp_path / name, {"tokenizer_class": name}, model)
        config = plain_config(folder)
        assert config is not None
        assert load_result(folder, config=config) == load_result(folder), name


@pytest.mark.parametrize(
    ("tokenizer", "model"),
    [
        ({"tokenizer_class": None}, {"model_type": "llama"}),
        ({"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}}, {"model_type": "llama"}),
        ({"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}),
        ({"tokenizer_class": "LlamaTokenizer"}, {"architectures": []}),
        ({"tokenizer_class": "LlamaTokenizer"}, None),
    ],
)
def test_plain_config_is_none_if_the_class_is_not_named(
    folders: dict[str, Path], tmp_path: Path, tokenizer: dict[str, Any], model: dict[str, Any] | None
) -> None:
    assert plain_config(make_folder(folders["bytelevel"], tmp_path / "model", tokenizer, model)) is None


def test_plain_config_is_none_for_damaged_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_folder(folders["bytelevel"], tmp_path / "model", {}, {"model_type": "llama"})
    assert plain_config(folder) is not None
    for content in (b"[1]", b"\xff\xfe", b"{"):
        (folder / "config.json").write_bytes(content)
        assert plain_config(folder) is None
    assert Tokenizer.load(folders["bytelevel"]).folder == folders["bytelevel"]
