"""Fixtures: small tokenizers of five kinds, trained on a few sentences and saved as model folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from batchgen.errors import ErrorInfo
from batchgen.request.rows.parser import parse_row
from batchgen.request.rows.values import RowDefaults
from batchgen.text.encode import EncodedPrompt, Encoder
from batchgen.text.tokens.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello there, how are you today? I am fine, thank you!",
    "Sorting numbers: 1, 2, 3 and 10. Stop here, please.",
    "Zażółć gęślą jaźń — naïve café, 東京 and émigré.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "don't can't isn't it's we're they've   spaces",
]
KINDS = ["bytelevel", "nested", "bytefallback", "wordpiece", "unigram"]
SPECIAL_TOKENS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'narrator' %}{{ raise_exception('no role narrator') }}{% endif -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else -%}
{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if tools %}tools:{{ tools | tojson }}{% endif -%}
{%- if mood %}mood:{{ mood }}{% endif -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def _bytelevel() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return backend


def _nested() -> Backend:
    """Byte-level tokens whose decoder has a further step, so that text is decoded in windows."""
    backend = _bytelevel()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def _bytefallback() -> Backend:
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_only = [s.encode("ascii", "ignore").decode() for s in SENTENCES]
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    names = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [token for token in learned["vocab"] if token not in names]
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


def _wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False)
    )
    return backend


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False),
    )
    return backend


BUILDERS = {
    "bytelevel": _bytelevel,
    "nested": _nested,
    "bytefallback": _bytefallback,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}


def save_tokenizer(
    folder: Path,
    kind: str,
    *,
    bos: bool = True,
    template: str | dict[str, str] | None = CHAT_TEMPLATE,
    added: Sequence[str] = (),
    special: Sequence[str] = (),
) -> Path:
    """`added`, `special`: further tokens of the vocabulary, which are text or special tokens."""
    backend = BUILDERS[kind]()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    hf.add_tokens(list(added))
    hf.add_tokens(list(special), special_tokens=True)
    hf.chat_template = template
    hf.save_pretrained(folder)
    end = backend.token_to_id("<|im_end|>")
    generation = {"temperature": 0.7, "top_k": 20, "eos_token_id": [end]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by tokenizer kind, each with BOS and a chat template."""
    return {kind: save_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """The byte-level tokenizer."""
    return tokenizers["bytelevel"]


def encode_result(encoder: Encoder, row: dict[str, Any]) -> list[EncodedPrompt] | ErrorInfo:
    ((_, result),) = encoder.encode_rows([(0, parse_row(row, 0, RowDefaults()))])
    assert result is not None
    return result


def encode(encoder: Encoder, row: dict[str, Any]) -> list[EncodedPrompt]:
    """The prompts of a row, which must be valid."""
    result = encode_result(encoder, row)
    assert not isinstance(result, ErrorInfo), result
    return result


def encode_error(encoder: Encoder, row: dict[str, Any]) -> ErrorInfo:
    """The error of a row."""
    result = encode_result(encoder, row)
    assert isinstance(result, ErrorInfo), result
    return result
