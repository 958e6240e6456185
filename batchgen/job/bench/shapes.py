"""Random models of named shapes: real sizes, seeded weights, nothing downloaded. Kept in the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from batchgen.errors import OutputError, UsageError

__all__ = ["RANDOM", "SHAPES", "Shape", "build_model", "resolve_bench_model"]

RANDOM = "random:"
_RECIPE = 1
"""Counts changes of how weights are drawn, so that a cached folder of an older recipe is not taken."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int = 8192


SHAPES: dict[str, Shape] = {
    "135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=8192),
    "5m": Shape(layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, inner=640, vocab=2048),
}


def resolve_bench_model(name: str) -> str:
    """The folder of `random:SHAPE`, built if it is not there; any other name as it is.

    Raises:
        UsageError: there is no such shape.
        OutputError: the cache folder cannot be written.
    """
    if not name.startswith(RANDOM):
        return name
    key = name.removeprefix(RANDOM)
    if key not in SHAPES:
        known = ", ".join(RANDOM + shape for shape in SHAPES)
        raise UsageError(f"unknown random model {name!r}; take one of {known}, or name a model folder")
    folder = _cache() / f"random-{key}-v{_RECIPE}"
    if not (folder / "config.json").is_file():
        try:
            _build_aside(SHAPES[key], folder)
        except OSError as error:
            raise OutputError(f"cannot write the random model {folder}: {error.strerror or error}") from None
    return str(folder)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "batchgen" / "bench"


def _build_aside(shape: Shape, folder: Path) -> None:
    """Build under another name first: a folder that is there is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        build_model(shape, aside)
        aside.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another run was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def build_model(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Write a Hugging Face folder of this shape: bfloat16 weights, and a tokenizer with a word for each id."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _draw(name, size, generator) for name, size in _tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=2))
    words = {f"w{i}": i for i in range(shape.vocab)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "shape.json").write_text(json.dumps({**asdict(shape), "seed": seed, "recipe": _RECIPE}))


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        sizes |= {
            f"{layer}self_attn.q_proj.weight": (q, shape.hidden),
            f"{layer}self_attn.k_proj.weight": (kv, shape.hidden),
            f"{layer}self_attn.v_proj.weight": (kv, shape.hidden),
            f"{layer}self_attn.o_proj.weight": (shape.hidden, q),
            f"{layer}mlp.gate_proj.weight": (shape.inner, shape.hidden),
            f"{layer}mlp.up_proj.weight": (shape.inner, shape.hidden),
            f"{layer}mlp.down_proj.weight": (shape.hidden, shape.inner),
            f"{layer}input_layernorm.weight": (shape.hidden,),
            f"{layer}post_attention_layernorm.weight": (shape.hidden,),
        }
    return sizes | {"model.norm.weight": (shape.hidden,)}


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Weights of about the size of a trained model's, so that what a row generates depends on all of its prompt.

    With the library's own initialisation the tied embedding outweighs thirty layers, and every row repeats its last
    token: a benchmark whose correctness gate would see nothing.
    """
    values = torch.randn(size, generator=generator)
    if len(size) == 1:
        return (1.0 + 0.1 * values).to(torch.bfloat16)
    if name == "model.embed_tokens.weight":
        return (0.02 * values).to(torch.bfloat16)
    scale = float(size[1]) ** -0.5
    weights: Tensor = (values * scale).to(torch.bfloat16)
    return weights
