"""Small random checkpoints that return embeddings or scores, with their tokenizers, and the library's results for them.

`save_encoder("bert", folder)` writes an encoder, `save_scorer("bert", folder)` one with a classification head; both
take a causal type, too. The library computes a row alone and without padding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from tests.models.tiny import tiny_config

Floats = npt.NDArray[np.float32]

WORDS = ("the", "quick", "brown", "fox", "lake", "stone", "green", "river", "cat", "tree", "of", "in", "is", "a", "sun")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 2}
"""Windows of ModernBERT."""
BY_TYPE: dict[str, dict[str, Any]] = {
    "modernbert": LOCAL,
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
}


def texts(count: int, longest: int = 40, seed: int = 0) -> list[str]:
    """Texts of 1 to `longest` words."""
    rng = Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def save_tokenizer(folder: Path, kind: str = "bert") -> None:
    """A tokenizer of words with the special tokens of BERT, of RoBERTa, or a token behind the text alone (`end`)."""
    vocab = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    single, pair = {
        "bert": ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "end": ("$A </s>", "$A $B </s>"),
    }[kind]
    special = [(name, vocab[name]) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if kind == "bert" else ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **names).save_pretrained(folder)


def save_encoder(kind: str, folder: Path, *, auto: Any = AutoModel, words: str | None = None, **fields: Any) -> Path:
    """A float32 checkpoint with random weights, and a tokenizer whose special tokens are those of `words`."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = tiny_config(
                kind, **{"max_position_embeddings": 66, "pad_token_id": 1, **BY_TYPE.get(kind, {}), **fields}
            )
            model = auto.from_config(config, attn_implementation="eager")
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    one = 0.0 if name.endswith("bias") else parameter.detach().clone()
                    parameter.data = one + 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    finally:
        if bar:
            logging.enable_progress_bar()
    roberta = hasattr(getattr(model.base_model, "embeddings", None), "create_position_ids_from_input_ids")
    save_tokenizer(folder, words or ("roberta" if roberta else "bert"))
    return folder


def save_scorer(kind: str, folder: Path, labels: int = 3, **fields: Any) -> Path:
    """As `save_encoder`, with a classification head of `labels` labels."""
    names = {i: f"label {i}" for i in range(labels)}
    ids = {name: i for i, name in names.items()}
    auto = AutoModelForSequenceClassification
    return save_encoder(kind, folder, auto=auto, num_labels=labels, id2label=names, label2id=ids, **fields)


def add_modules(folder: Path, pooling: dict[str, Any], *more: str, **about: Any) -> None:
    """The files of sentence-transformers: a pooling, the modules named in `more`, and the keys of their settings."""
    names = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    write(folder / "modules.json", modules)
    write(folder / paths[1] / "config.json", {"word_embedding_dimension": 64, **pooling})
    write(
        folder / "sentence_bert_config.json", about.pop("transformer", {"max_seq_length": 60, "do_lower_case": False})
    )
    write(folder / "config_sentence_transformers.json", about)


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


@torch.no_grad()
def library_states(folder: Path, rows: Sequence[str]) -> list[Floats]:
    """[P, H] states of each text, computed alone by transformers."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in rows]


@torch.no_grad()
def library_logits(folder: Path, rows: Sequence[str | tuple[str, str]]) -> list[Floats]:
    """[labels] logits of each text, or pair of texts, computed alone by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(row,) if isinstance(row, str) else row for row in rows]
    return [model(**tokenizer(*pair, return_tensors="pt")).logits[0].numpy() for pair in pairs]
