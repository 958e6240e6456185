"""Tokenizers out of GGUF files equal the tokenizer.json that their metadata was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchgen.errors import ModelError
from batchgen.gguf.vocabulary import SPLITS
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.models.gguf_files import tokenizer_metadata, write_tiny
from tests.text.conftest import SENTENCES

TEXTS = [
    *SENTENCES,
    "",
    " leading and  double   spaces\n\n\nlines\ttabs ",
    "12345 3.14 2024-01-05 x1y22",
    "<|im_start|>user\nHi<|im_end|>\n<think>so</think>",
    "İstanbul 北京 한국어 🙂 résumé",
    "we'Ve DON'T camelCase snake_case a/b//c",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
STEPS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""Rules of common families, as their tokenizer.json has them."""


def gguf(path: Path, metadata: dict[str, Any]) -> Path:
    return write_tiny(path, "llama", metadata=metadata)


def same(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Ids, texts, special tokens and templates are equal."""
    assert ours.encode(TEXTS) == theirs.encode(TEXTS)
    for ids in theirs.encode_plain(TEXTS):
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip)
    assert (ours.prefix_ids, ours.special_ids) == (theirs.prefix_ids, theirs.special_ids)
    assert ours.template_digest == theirs.template_digest
    prompt = ChatPrompt([{"role": "user", "content": "Hello"}])
    assert ours.encode_chat(prompt) == theirs.encode_chat(prompt)


def split_by(folder: Path, steps: list[Any], path: Path) -> Path:
    """Give a byte-level tokenizer other rules of splitting, and a token that is added and not special."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("pre", STEPS)
def test_byte_level_tokenizer_equals_its_folder(pre: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = split_by(folders["bytelevel"], STEPS[pre], tmp_path / "model")
    path = gguf(tmp_path / "model.gguf", tokenizer_metadata(folder, pre=pre, add_bos=True))
    same(Tokenizer.load(path), Tokenizer.load(folder))


@pytest.mark.parametrize("merges", [True, False])
def test_sentencepiece_tokenizer_equals_its_folder(merges: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Also without merges, which follow from the scores of the tokens."""
    folder = folders["bytefallback"]
    metadata = tokenizer_metadata(folder, kind="llama", add_bos=True)
    if merges:
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in model["merges"]]
    same(Tokenizer.load(gguf(tmp_path / "model.gguf", metadata)), Tokenizer.load(folder))


@pytest.mark.parametrize(("kind", "pre"), [("gemma4", None), ("gpt2", "gemma4"), ("gpt2", "sarvam-moe")])
def test_a_tokenizer_like_sentencepiece_with_merges_equals_its_folder(
    kind: str, pre: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """As Gemma 4 has it: texts get no space in front."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders["bytefallback"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(folder / "tokenizer.json"))
    metadata = tokenizer_metadata(folder, kind="llama", add_bos=True)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    metadata |= {"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}
    metadata["tokenizer.ggml.add_bos_token"] = kind != "gemma4"  # whose first files deny what its tokenizer does
    metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in model["merges"]]
    same(Tokenizer.load(gguf(tmp_path / "model.gguf", metadata)), Tokenizer.load(folder))


@pytest.mark.parametrize("pre", SPLITS)
def test_every_rule_keeps_texts(pre: str, folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre=pre, add_bos=False)
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


SPLIT_TEXTS = {
    "kimi-k2": ("北京Hello2024年", ["北京", "Hello", "202", "4", "年"]),
    "deepseek-llm": ("abc 12, x", ["abc", " ", "1", "2", ",", " x"]),
    "afmoe": ("12345 ab", ["12", "345", " ab"]),
    "tiny_aya": ("1234567 it's", ["1", "234", "567", " it's"]),
    "viking": ("ab12. c", ["ab", "1", "2", ".", " c"]),
    "youtu": ("去It's 12", ["去", "It's", " ", "1", "2"]),
}
"""Rule -> a text, and the words that it is split into."""


@pytest.mark.parametrize("pre", SPLIT_TEXTS)
def test_rules_split_words_where_their_families_do(pre: str, tmp_path: Path) -> None:
    """In a vocabulary that has all merges of a text, its tokens are its words."""
    text, words = SPLIT_TEXTS[pre]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    whole = encode(text)[0][0]
    parts = {whole[i:j] for i in range(len(whole)) for j in range(i + 1, len(whole) + 1)}
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(part for part in parts if len(part) > 1)]
    merges = [f"{part[:cut]} {part[cut:]}" for part in sorted(parts, key=len) for cut in range(1, len(part))]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    ids = tokenizer.encode_plain([text])[0]
    assert [tokenizer.decode([i], skip_special_tokens=False) for i in ids] == words


def test_a_word_of_the_vocabulary_is_taken_whole_where_the_family_does(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*alphabet, "ab", "abcd"],
        "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    for pre, expected in (("llama-bpe", ["abcd"]), ("qwen2", ["ab", "c", "d"])):
        tokenizer = Tokenizer.load(gguf(tmp_path / f"{pre}.gguf", {**metadata, "tokenizer.ggml.pre": pre}))
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode_plain(["abcd"])[0]] == expected


@pytest.mark.parametrize(
    ("stated", "pre", "adds"),
    [(True, "gpt-2", True), (False, "llama-bpe", False), (None, "llama-bpe", True), (None, "qwen2", False)],
)
def test_bos_is_added_as_stated_or_as_the_family_does(
    stated: bool | None, pre: str, adds: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre=pre, add_bos=True)
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata |= {} if stated is None else {"tokenizer.ggml.add_bos_token": stated}
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    assert tokenizer.prefix_ids == ([metadata["tokenizer.ggml.bos_token_id"]] if adds else [])


def test_ids_that_end_a_turn_end_a_sequence(folders: dict[str, Path], tmp_path: Path) -> None:
    """The file states one end of sequence; that of a conversation is known by its name, or stated as end of turn."""
    metadata = tokenizer_metadata(folders["bytelevel"], pre="gpt-2", add_bos=True)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.eot_token_id"] = tokens.index("<|im_start|>")
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    assert tokenizer.eos_ids == {tokens.index(each) for each in ("</s>", "<|im_start|>", "<|im_end|>")}


def test_sampling_defaults_come_from_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre="gpt-2", add_bos=True)
    stated = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.25, "mirostat": 0, "xtc_probability": 0.5}
    path = gguf(tmp_path / "model.gguf", metadata | {f"general.sampling.{key}": value for key, value in stated.items()})
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.25}
    for tokenizer in (Tokenizer.load(path), Tokenizer.load(folders["bytelevel"], model=path)):
        assert tokenizer.generation.sampling_defaults(100) == expected
        assert "sets it: `xtc_probability` 0.5; set" in str(tokenizer.generation.note)


def test_named_templates_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre="gpt-2", add_bos=False)
    metadata |= {
        "tokenizer.chat_template": "{{ messages[0].content }} alone", "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ messages[0].content }} {{ tools | tojson }}",
    }  # fmt: skip
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    message = {"role": "user", "content": "x"}
    assert tokenizer.render_chat(ChatPrompt([message])) == "x alone"
    assert tokenizer.render_chat(ChatPrompt([message], tools=[tool])).startswith("x [{")


def test_the_digest_is_that_of_the_metadata(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre="gpt-2", add_bos=True)
    digests = [
        Tokenizer.load(gguf(tmp_path / f"{i}.gguf", {**metadata, "tokenizer.ggml.eos_token_id": eos})).digest
        for i, eos in enumerate((1, 1, 2))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_padding_of_the_vocabulary_has_no_text(folders: dict[str, Path], tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folders["bytelevel"], pre="gpt-2", add_bos=False)
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size}]"]
    metadata["tokenizer.ggml.token_type"] += [5]
    tokenizer = Tokenizer.load(gguf(tmp_path / "model.gguf", metadata))
    assert (tokenizer.vocab_size, tokenizer.decode([size])) == (size, "")


BASE = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"tokenizer.ggml.model": None}, "holds no tokenizer. Name one with --tokenizer"),
    "other kind": ({"tokenizer.ggml.model": "rwkv"}, "is of the kind 'rwkv'"),
    "unknown rule": ({"tokenizer.ggml.pre": "klingon"}, "splits texts by a rule 'klingon', which is not known"),
    "rule of another type": ({"tokenizer.ggml.pre": ["qwen2"]}, "by something else than a text"),
    "no merges": ({"tokenizer.ggml.merges": None}, "has no merges"),
    "merges of other tokens": ({"tokenizer.ggml.merges": ["x y"]}, "merges that do not fit its tokens"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "holds no vocabulary"),
    "numbers for tokens": ({"tokenizer.ggml.tokens": [1, 2]}, "other entries than str"),
    "too few types": ({"tokenizer.ggml.token_type": [1, 1]}, "has 2 entries in tokenizer.ggml.token_type for 3 tokens"),
    "no scores": ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "has neither merges nor scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(gguf(tmp_path / "model.gguf", {**BASE, **changes}))
