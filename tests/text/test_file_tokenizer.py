"""`load_file_tokenizer`: where it reads a folder, it gives what transformers gives; elsewhere it leaves it to it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from batchgen.demo import model_path
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.text.tokens.file_tokenizer import load_file_tokenizer
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.text.conftest import CHAT_TEMPLATE, KINDS, SENTENCES

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

ROUNDS = 50
HOSTILE = [
    "", " ", "  a", "\n\n \t x\r\n", "<s>", "a<|im_end|>b </s>", "<|im_start|> <|im_start|>", "<|endoftext|>x",
    "cafe\u0301 \u212b \ufb01", "\u200b\u202e\ufeff", "\U0001f469\u200d\U0001f52c", "1234567890", "<0x0A>",
    "\u2581a \u2581", "I'll WE'LL '\u017ft", "\x00\x1f", "<image>", "x" * 300,
]  # fmt: skip


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = [*SENTENCES, *HOSTILE, "<pad>", "<s", "|>", "é", "東", "\u0301", " ", "  ", "\n"]
    mixed = ["".join(rng.choice(pieces)[: rng.randint(1, 9)] for _ in range(12)) for _ in range(40)]
    wild = [
        "".join(chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(32, 127)])) for _ in range(20)) for _ in "ab"
    ]
    return [*SENTENCES, *HOSTILE, *mixed, *wild]


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def qwen_folder(folder: Path, **described: Any) -> Path:
    """Like those of Qwen: special tokens behind the vocabulary, all of them in tokenizer_config.json."""
    backend = Backend(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    backend.normalizer, backend.decoder = normalizers.NFC(), decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated", False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    added = {str(i): token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "bos_token": None, "unk_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_prefix_space": False, "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "split_special_tokens": False, "errors": "replace",
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    backend.save(str(folder / "tokenizer.json"))
    return write(folder, {"tokenizer_config.json": {**config, **described}, "config.json": {"model_type": "qwen3"}})


def check_equal(folder: Path, seed: int = 0) -> bool:
    """Compare both tokenizers of a folder in all that is read of them; whether there are both."""
    lean = load_file_tokenizer(folder)
    if lean is None:
        return False
    library = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    assert lean.special_tokens_map == library.special_tokens_map
    assert lean.chat_template == library.chat_template
    assert lean.response_template == library.response_template
    one, other = Tokenizer(lean, folder), Tokenizer(library, folder)
    for name in ("prefix_ids", "added_ids", "special_ids", "eos_ids", "vocab_size", "byte_fallback", "decode_prefix"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.digest, one.template_digest) == (other.digest, other.template_digest)
    assert one.vocab_size == max(library.get_vocab().values()) + 1
    assert [one.id_to_token(i) for i in range(one.vocab_size)] == library.convert_ids_to_tokens(
        [*range(one.vocab_size)]
    )
    rng, sample = random.Random(seed), texts(seed)
    assert one.encode(sample) == other.encode(sample)
    assert one.encode_plain(sample) == library(sample, add_special_tokens=False)["input_ids"]
    for text in sample[:30]:
        assert one.encode_continuations("Hello 1", [text]) == other.encode_continuations("Hello 1", [text])
    for ids in [*one.encode(sample), *([rng.randrange(one.vocab_size) for _ in range(9)] for _ in range(40))]:
        for skip in (True, False):
            clean = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert one.decode(ids, skip) == library.decode(ids, **clean)
    if one.template is not None and isinstance(lean.chat_template, str):
        messages = tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(sample[:7]))
        expected = library.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        assert one.render_chat(ChatPrompt(messages)) == expected
    return True


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A folder of a Llama whose tokenizer is byte-level."""
    return llama_folder(folders["bytelevel"], tmp_path / "folder")


def llama_folder(source: Path, folder: Path, model_type: str = "llama") -> Path:
    shutil.copytree(source, folder)
    return write(folder, {"config.json": {"model_type": model_type}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "llava"])
def test_a_folder_of_a_plain_class_is_read_alone(
    folders: dict[str, Path], tmp_path: Path, kind: str, model_type: str
) -> None:
    assert check_equal(llama_folder(folders[kind], tmp_path / "folder", model_type))


def test_the_demonstration_model_is_read_alone() -> None:
    assert check_equal(model_path())


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2TokenizerFast"), ("llama", "Qwen2Tokenizer")]
)
def test_a_qwen_is_read_alone(tmp_path: Path, model_type: str, name: str) -> None:
    folder = qwen_folder(tmp_path, tokenizer_class=name)
    assert check_equal(write(folder, {"config.json": {"model_type": model_type}}))


def edited(folder: Path, name: str, **changes: Any) -> Path:
    content = json.loads((folder / name).read_text())
    return write(folder, {name: {**content, **changes}})


PLAIN: dict[str, dict[str, Any]] = {
    "bos asked for": {"add_bos_token": True, "add_eos_token": True},
    "own token": {"tool_token": "<|im_start|>", "model_max_length": 5, "padding_side": "left"},
    "clean up": {"clean_up_tokenization_spaces": True, "legacy": False, "processor_class": "X"},
    "named templates": {"chat_template": [{"name": "default", "template": "{{ 1 }}"}, {"name": "b", "template": "a"}]},
    "marked token": {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}},
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_changes_no_token_is_read_alone(folder: Path, case: str) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert check_equal(edited(folder, "tokenizer_config.json", **PLAIN[case]))


def test_an_older_folder_is_read_alone(folder: Path) -> None:
    own = {
        "bos_token": {"content": "<s>", "special": True},
        "additional_special_tokens": ["<|im_end|>"],
        "tool_token": "<s>",
    }
    assert check_equal(write(folder, {"special_tokens_map.json": own}))


LEFT: dict[str, dict[str, Any]] = {
    "new special token": {"eos_token": "<new>"},
    "text as special token": {"eos_token": "a"},
    "new listed token": {"additional_special_tokens": ["<new>"]},
    "named listed tokens": {"extra_special_tokens": {"image_token": "<|im_end|>"}},
    "other flags": {"added_tokens_decoder": {"0": {"content": "<s>", "lstrip": True, "special": True}}},
    "split": {"split_special_tokens": True},
    "unknown key": {"vocab": {"a": 0}},
    "own code": {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
    "another class": {"tokenizer_class": "GemmaTokenizer"},
    "Llama's class": {"tokenizer_class": "LlamaTokenizerFast"},
    "no class": {"tokenizer_class": None},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_transformers_may_change_is_left_to_it(folder: Path, case: str) -> None:
    assert load_file_tokenizer(edited(folder, "tokenizer_config.json", **LEFT[case])) is None


FILES: dict[str, dict[str, Any]] = {
    "another type": {"config.json": {"model_type": "gemma2"}},
    "no type": {"config.json": {}},
    "older added tokens": {"added_tokens.json": {"<new>": 999}},
    "older special tokens": {"special_tokens_map.json": {"add_bos_token": True}},
    "Mistral's own": {"tekken.json": {}},
    "damaged": {"tokenizer_config.json": "{"},
    "damaged older tokens": {"special_tokens_map.json": "{"},
}


@pytest.mark.parametrize("case", FILES)
def test_other_files_leave_a_folder_to_transformers(folder: Path, case: str) -> None:
    assert load_file_tokenizer(write(folder, FILES[case])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistral_passes_over_llamas_class(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = llama_folder(folders[kind], tmp_path / "folder", "mistral")
    assert check_equal(edited(folder, "tokenizer_config.json", tokenizer_class="LlamaTokenizer"))


PART = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": None},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, PART]}},
        {"pre_tokenizer": None},
        {"decoder": {"type": "Fuse"}},
        {"added_tokens": []},
    ],
)
def test_a_qwen_of_other_parts_is_left_to_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert load_file_tokenizer(edited(qwen_folder(tmp_path), "tokenizer.json", **changes)) is None


def random_folder(rng: random.Random, source: Path, target: Path) -> Path:
    """A folder with special tokens, their flags, classes and files that are changed at random."""
    qwen = rng.random() < 0.4
    target.mkdir()
    folder = qwen_folder(target) if qwen else shutil.copytree(source, target, dirs_exist_ok=True)
    names = ["<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<unk>", "a", "<tool_call>", None]
    whole = json.loads((folder / "tokenizer.json").read_text())
    described = json.loads((folder / "tokenizer_config.json").read_text())
    for token in whole["added_tokens"]:
        for flag in ("lstrip", "rstrip", "normalized", "special", "single_word"):
            token[flag] ^= rng.random() < 0.03
    if rng.random() < 0.1:
        whole["added_tokens"].append({**rng.choice(whole["added_tokens"]), "lstrip": True})
    if rng.random() < 0.2:
        whole["post_processor"] = None
    for _ in range(rng.randint(0, 3)):
        key = rng.choice(["bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "image_token"])
        described[key] = rng.choice(names)
    if rng.random() < 0.3:
        added = {str(token["id"]): token for token in whole["added_tokens"]}
        described["added_tokens_decoder"] = {i: {k: token[k] for k in token if k != "id"} for i, token in added.items()}
    elif rng.random() < 0.2:
        described.pop("added_tokens_decoder", None)
    if rng.random() < 0.3:
        described["tokenizer_class"] = rng.choice(["LlamaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"])
    if rng.random() < 0.2:
        described["add_prefix_space"] = rng.random() < 0.5
    if rng.random() < 0.3:
        write(folder, {"special_tokens_map.json": {"eos_token": rng.choice(names[:5])}})
    model = {"model_type": rng.choice(["llama", "mistral", "qwen3"] if not qwen else ["llama", "qwen2", "qwen3"])}
    return write(folder, {"tokenizer.json": whole, "tokenizer_config.json": described, "config.json": model})


def test_random_folders_give_what_transformers_gives(folders: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    made = [random_folder(rng, folders[rng.choice(KINDS)], tmp_path / str(i)) for i in range(ROUNDS)]
    alone = sum(check_equal(folder, seed) for seed, folder in enumerate(made))
    assert ROUNDS / 5 < alone < ROUNDS * 4 / 5
