"""A tiny random model whose tokens are all whole characters, so that random tokens give valid text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import save_tiny

SPECIALS = ["<s>", "</s>", "<|end|>", "<|call|>"]
EOS = 1
WORDS = [
    '": ', '", "', '{"', '"}', "}, ", '": "', "true", "false", "null", "12", "00", "-1", ".5", "e2", "ab", "abc", "the",
    "\\n", '\\"', "\\u00", "], [", " a", "foo", "bar", "yes", "no", "2024-", "://", "</", "<a", "é", "ł", "日",
    "本", "😀", "ñ",
]  # fmt: skip
"""Tokens of several bytes."""
CHARACTERS = [chr(code) for code in range(0x20, 0x7F)] + ["\n", "\t", "\r"]
PADDING = 13
"""Number of model ids that the tokenizer does not have."""
VOCAB = len(SPECIALS) + len(CHARACTERS) + len(WORDS)
"""Size of the tokenizer's vocabulary."""
CLOSING = ('"', "}", "]", '"}', "</", ")", "0", "=", "z")
"""Tokens that lead to the end of a text, for `logit_bias`, because a random model would not stop."""


def _spelled(text: str) -> str:
    """The text in the spelling of byte-level vocabularies."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def save_grammar_model(folder: Path, context: int = 512) -> Path:
    """Write the checkpoint to `folder`."""
    sizes = {"vocab_size": VOCAB + PADDING, "num_hidden_layers": 1, "max_position_embeddings": context}
    save_tiny("llama", folder, **sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=EOS)
    save_grammar_tokenizer(folder)
    return folder


def save_grammar_tokenizer(folder: Path) -> None:
    """Write the tokenizer and the end-of-sequence ids to a model's folder."""
    tokens = [*SPECIALS, *map(_spelled, CHARACTERS), *map(_spelled, WORDS)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    assert len(tokenizer) == VOCAB
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 2]}))
