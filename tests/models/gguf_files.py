"""Writer of GGUF files for tests: tiny random checkpoints as llama.cpp's converter stores them.

Values come from the package's own quantiser, so that the reader's are compared with those of another hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from tests.models.dense_attention import DenseCache
from tests.models.gguf_layout import ARCHITECTURES, gguf_metadata, gguf_tensors, xielu_lists
from tests.models.loading import inspect_model, load_model
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import tiny_model

_FLOATS = {Kind.F64: np.float64, Kind.F32: np.float32, Kind.F16: np.float16}
Choose = Callable[[str, Any], Kind]
"""Name and values of a tensor -> the type that it is stored as."""


def as_kind(kind: Kind) -> Choose:
    """Matrices in `kind`, vectors in float32."""
    return lambda _, values: kind if values.ndim > 1 else Kind.F32


AS_FLOAT32 = as_kind(Kind.F32)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    choose: Choose = AS_FLOAT32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    **options: Any,
) -> Path:
    """Write a model of transformers as a GGUF file.

    Args:
        path: the file.
        model: a model in float32.
        choose: how each tensor is stored.
        metadata: further keys, and other values of keys.
        extra: further tensors.
        architecture: that of the file, if it is not the usual one of the model's type.
        change: what is made of the model's tensors.
        options: of `gguf.GGUFWriter`, as for splitting.
    """
    config = model.config
    architecture = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture, **options)
    lists = xielu_lists(model) if architecture == "apertus" else {}
    for key, value in {**gguf_metadata(config, architecture), **lists, **(metadata or {})}.items():
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        else:
            _add(writer, key, value)
    for name, values in {**change(gguf_tensors(model, architecture)), **(extra or {})}.items():
        kind = choose(name, values)
        if kind in _FLOATS:
            writer.add_tensor(name, values.astype(_FLOATS[kind]))
        else:
            data = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(path: Path, model_type: str, *, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write `tiny_model(model_type, **config)`; see `write_gguf`."""
    return write_gguf(path, tiny_model(model_type, **(config or {})), **options)


def logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]


def check_file(path: Path, reference: PreTrainedModel, **options: Any) -> None:
    """Logits of the file's model equal the reference's."""
    model = load_model(path, dtype="float32", device="cpu", **options)
    assert inspect_model(path, dtype="float32", device="cpu", **options) == model.spec
    sequences = random_sequences(model.spec.vocab_size)
    for ours, theirs in zip(
        packed_logits(model, sequences, DenseCache().step), logits(reference, sequences), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tokenizer_metadata(folder: Path, *, kind: str = "gpt2", pre: str | None = None, add_bos: bool) -> dict[str, Any]:
    """Metadata of the tokenizer of a Hugging Face folder, as the converter writes it.

    Args:
        folder: a folder with tokenizer.json and tokenizer_config.json.
        kind: `gpt2` for a byte-level vocabulary, `llama` for SentencePiece.
        pre: the name of the rule by which a byte-level vocabulary splits texts.
        add_bos: whether texts begin with BOS.
    """
    hf = AutoTokenizer.from_pretrained(folder)
    model = json.loads(hf.backend_tokenizer.to_str())["model"]
    ids = hf.backend_tokenizer.get_vocab(with_added_tokens=True)
    added = hf.backend_tokenizer.get_added_tokens_decoder()
    tokens, types = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)], [5] * (max(ids.values()) + 1)
    for token, i in ids.items():
        is_byte = kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None
        tokens[i], types[i] = token, 6 if is_byte else 1
    for i, token in added.items():
        types[i] = 3 if token.special else 4
    if kind == "llama":
        types[hf.unk_token_id] = 2
    found = {
        "model": kind, "pre": pre, "tokens": tokens, "token_type": types, "add_bos_token": add_bos,
        "bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id, "padding_token_id": hf.pad_token_id,
        "unknown_token_id": hf.unk_token_id,
    }  # fmt: skip
    if kind == "llama":
        # A vocabulary of SentencePiece lists its tokens in the order of its merges.
        found["scores"] = [float(-i) for i in range(len(tokens))]
    else:
        found["merges"] = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}
    return metadata | ({"tokenizer.chat_template": hf.chat_template} if hf.chat_template else {})
