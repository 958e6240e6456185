"""Folders without tokenizer.json: they load, or the message names what is missing."""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models

from batchgen.demo import model_path
from batchgen.errors import ModelError, RowError
from batchgen.text.param_checks import bad_word_sequences
from batchgen.text.tokens import model_files
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import SENTENCES

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
TIKTOKEN = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))


@pytest.fixture(scope="session")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SentencePiece models by algorithm."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    rng = random.Random(0)
    words = " ".join(SENTENCES).split()
    (folder / "corpus.txt").write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(400)))
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"), model_prefix=str(folder / kind), model_type=kind, vocab_size=360,
            byte_fallback=True, hard_vocab_limit=False, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        )  # fmt: skip
    return {kind: folder / f"{kind}.model" for kind in ("bpe", "unigram")}


def write(folder: Path, description: dict[str, Any] | None, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if description is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(description))
    return folder


@pytest.mark.parametrize(("kind", "description"), [("bpe", LLAMA), ("bpe", None), ("unigram", None)])
def test_a_sentencepiece_model_alone_loads(
    sentencepieces: dict[str, Path], tmp_path: Path, kind: str, description: dict[str, Any] | None
) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, description, {"tokenizer.model": sentencepieces[kind].read_bytes()}))
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepieces[kind]))
    for text in SENTENCES[:3]:
        assert tokenizer.encode_plain([text]) == [original.encode(text)]
        assert tokenizer.decode_output(original.encode(text)).strip() == original.decode(original.encode(text))
    assert tokenizer.prefix_ids == ([1] if description else [])


def test_a_model_that_is_converted_wrongly_is_refused(sentencepieces: dict[str, Path], tmp_path: Path) -> None:
    """The class of the description is one of another algorithm: transformers would give other tokens without a word."""
    folder = write(tmp_path, LLAMA, {"tokenizer.model": sentencepieces["unigram"].read_bytes()})
    with pytest.raises(ModelError, match="gives other tokens when transformers converts it"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("missing", ["sentencepiece", "protobuf"])
def test_a_missing_package_is_named_with_the_extra(
    sentencepieces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    found = model_files.find_spec
    hidden = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}[missing]
    monkeypatch.setattr(model_files, "find_spec", lambda name: None if name == hidden else found(name))
    folder = write(tmp_path, LLAMA, {"tokenizer.model": sentencepieces["bpe"].read_bytes()})
    with pytest.raises(ModelError, match=rf"package {missing}\. .*pip install 'batchgen\[sentencepiece\]'"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "description", [None, {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "GPT2TokenizerFast"}]
)
def test_a_vocabulary_and_merges_alone_load(tmp_path: Path, description: dict[str, Any] | None) -> None:
    whole = json.loads((Path(model_path()) / "tokenizer.json").read_text())["model"]
    merges = "\n".join(" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"])
    files = {"vocab.json": json.dumps(whole["vocab"]).encode(), "merges.txt": f"#version: 0.2\n{merges}".encode()}
    if description is not None:
        description = {**description, "bos_token": "<|bos|>", "eos_token": "<|end|>", "unk_token": "<|eos|>"}
    tokenizer = Tokenizer.load(write(tmp_path, description, files))
    for text in ("hello there", "name: Ada, city: Oslo"):
        (ids,) = tokenizer.encode_plain([text])
        assert tokenizer.decode(ids) == text
        assert max(ids) < len(whole["vocab"]), "nothing is added to the vocabulary"


ORDINARY = "The quick brown fox jumps over the lazy dog. Prices: 1,234.50 for 2 cafés, naïve 東京"
LETTERS = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("CodeLlamaTokenizer", models.BPE(LETTERS, [])),
        ("NllbTokenizer", models.BPE(LETTERS, [])),
        ("GemmaTokenizer", models.BPE(LETTERS, [])),
        ("PreTrainedTokenizerFast", models.WordLevel({**LETTERS}, unk_token="<unk>")),
        ("PreTrainedTokenizerFast", models.Unigram([(letter, -1.0) for letter in LETTERS])),
    ],
)
def test_a_tokenizer_that_raises_ends_the_run_with_the_librarys_words(
    tmp_path: Path, name: str, model: models.Model
) -> None:
    """When it is built, or about any text with a character that the vocabulary lacks."""
    write(tmp_path, {"tokenizer_class": name}, {"tokenizer.json": Backend(model).to_str().encode()})
    words = r"cannot be loaded: Exception: .*([Uu]nk|UNK).*\. Name another tokenizer with --tokenizer\."
    with pytest.raises(ModelError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.exit_code == 6


def test_a_text_that_the_library_cannot_encode_is_an_error_of_its_field(tmp_path: Path) -> None:
    known = {letter for text in (*SENTENCES, ORDINARY) for letter in text} | set("\n ab")
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(sorted(known))}, [], unk_token="<unk>"))
    write(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer.json": backend.to_str().encode()})
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(RowError, match=r"the text cannot be tokenized: .*[Uu]nk") as caught:
        tokenizer.encode_plain(["a", "ab\u2603"])
    assert caught.value.info.code == "invalid_field"
    with pytest.raises(RowError, match="the text cannot be tokenized") as caught:
        bad_word_sequences(["\u2603"], tokenizer, 100)
    assert caught.value.info.code == "invalid_field"


REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "vocabulary without merges": ({"vocab.json": b"{}"}, "has vocab.json but lacks merges.txt"),
    "merges without vocabulary": ({"merges.txt": b"a b"}, "has merges.txt but lacks vocab.json"),
    "tiktoken": ({"tiktoken.model": TIKTOKEN}, r"tiktoken vocabulary \(tiktoken.model\) and no tokenizer.json"),
    "tiktoken of a family": ({"family.tiktoken": TIKTOKEN}, r"tiktoken vocabulary \(family.tiktoken\)"),
    "tiktoken under another name": ({"tokenizer.model": TIKTOKEN}, r"tiktoken vocabulary \(tokenizer.model\)"),
    "tekken": ({"tekken.json": b"{}"}, r"Mistral's own format \(tekken.json\) and no tokenizer.json"),
    "nothing": ({}, "holds no tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    files, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(write(tmp_path, None, files))


def test_a_complete_folder_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(model_path(), tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(b"\x00")
    monkeypatch.setattr(model_files, "find_spec", lambda name: None)
    assert Tokenizer.load(folder).encode_plain(["a"])
