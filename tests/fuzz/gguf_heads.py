"""Fuzzer of GGUF files: an input replaces the head of a file, before its tensors.

The model is loaded, or refused by a `ModelError` of one line; so is its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from batchgen.errors import ModelError
from batchgen.models.check import check_model
from batchgen.text.tokens.tokenizer import Tokenizer
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.jobs import scratch
from tests.fuzz.mutations import mutate_bytes
from tests.fuzz.parsing import require
from tests.models.loading import load_model

_NAMES = ("general.architecture", "llama", "gemma3", "qwen2moe", "tokenizer.ggml.", "blk.0.", "GGUF")
_NUMBERS = (0, 1, 8, 9, 255, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)
_WORDS = (*(name.encode() for name in _NAMES), *(number.to_bytes(8, "little") for number in _NUMBERS))


@cache
def _parts() -> tuple[bytes, bytes]:
    """The head of an intact file, and the tensors."""
    from tests.models.gguf_files import Kind, as_kind, write_tiny

    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*(chr(97 + i) for i in range(26)), "ab", "<end>"],
        "tokenizer.ggml.token_type": [1] * 27 + [3], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 27, "tokenizer.ggml.scores": [float(i) for i in range(28)],
    }  # fmt: skip
    config = {"num_hidden_layers": 1}
    path = write_tiny(scratch() / "intact.gguf", "llama", config=config, choose=as_kind(Kind.Q4_0), metadata=metadata)
    data = path.read_bytes()
    start = min(info.start for info in check_model(path).folder.tensors.values())
    return data[:start], data[start:]


def _attempt(load: Callable[[Path], object], path: Path) -> str | None:
    try:
        load(path)
    except ModelError as error:
        text = str(error)
        text.encode()
        require("\n" not in text and len(text) < 3000, "a refusal is one line:", text)
        return text.rpartition("/")[2][-40:]
    return None


def _checked(data: bytes, *loads: Callable[[Path], object]) -> Hashable:
    with TemporaryDirectory(dir=scratch()) as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(data + _parts()[1])
        return tuple(_attempt(load, path) for load in loads)


def _check(data: bytes) -> Hashable:
    return _checked(data, check_model, lambda path: Tokenizer.load(path).generation.sampling_defaults(1 << 20))


def _check_loaded(data: bytes) -> Hashable:
    return _checked(data, load_model)


def _make(rng: Random) -> bytes:
    head = _parts()[0]
    return head[: rng.randrange(len(head))] if rng.random() < 0.2 else head


def _mutate(data: bytes, rng: Random) -> bytes:
    return mutate_bytes(data, rng, _WORDS)


FUZZERS = (Fuzzer("gguf", _check, _make, _mutate, ((5, _check_loaded),)),)
