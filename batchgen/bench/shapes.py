"""Random models of realistic sizes, and LoRA adapters for a model, with seeded weights and stored in the user's cache
folder. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from batchgen.bench.engines.peer_tools import build_folder
from batchgen.bench.workloads import AdapterSet
from batchgen.demo import model_path
from batchgen.errors import OutputError, UsageError
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.user_cache import cache_folder

RANDOM = "random:"
DEMO = "demo"
"""Name of the packaged demonstration model."""
_LETTERS = string.ascii_lowercase + string.digits
_RECIPE_VERSION = 3
"""Version of how models are generated; part of the cache folder's name."""
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER_VERSION = 1
"""Version of how adapters are generated; part of the cache key."""
_B_SCALE = 0.05
"""Standard deviation of B: changes each projection by a few per cent, so that outputs differ with the adapter."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a random model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int = 8192
    family: Literal["llama", "qwen3", "qwen3_next", "lfm2"] = "llama"
    tied: bool = True
    """Whether the head shares the embedding's weights."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """More of the configuration."""

    @property
    def parameters(self) -> int:
        """Number of parameters, including the head if it is not tied."""
        return sum(math.prod(size) for size in _tensors(self).values())


def _delta(key_heads: int, value_heads: int, size: int) -> dict[str, object]:
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "num_experts": 0}
    return {**heads, "linear_key_head_dim": size, "linear_value_head_dim": size}


SHAPES: dict[str, Shape] = {
    "135m": Shape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=8192),
    "5m": Shape(layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, inner=640, vocab=2048),
    # Three recurrent layers for one of attention, or two.
    "5m-qwen3-next": Shape(8, 256, 8, 4, 32, 640, 2048, family="qwen3_next", fields=_delta(4, 8, 32)),
    "135m-qwen3-next": Shape(30, 576, 9, 3, 64, 1792, 8192, family="qwen3_next", fields=_delta(3, 9, 64)),
    "135m-lfm2": Shape(
        30,
        576,
        9,
        3,
        64,
        1792,
        8192,
        family="lfm2",
        fields={"layer_types": ["conv", "conv", "full_attention"] * 10, "block_auto_adjust_ff_dim": False},
    ),
    # Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B.
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151_936, family="qwen3"),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128_256),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, tied=False),
}


def resolve_bench_model(name: str, device: torch.device | None = None) -> str:
    """The model folder of `random:SHAPE` (built if the cache lacks it) or `demo`; other names are returned as they are.

    Weights generated on a GPU, which is faster for billions of them, differ from those generated on a CPU.

    Args:
        name: value of `--model`.
        device: device that generates the weights; the CPU if None.

    Raises:
        UsageError: the shape is unknown.
        OutputError: the cache folder is not writable.
    """
    if name == DEMO:
        return str(model_path())
    if not name.startswith(RANDOM):
        return name
    key = name.removeprefix(RANDOM)
    if key not in SHAPES:
        known = ", ".join(RANDOM + shape for shape in SHAPES)
        raise UsageError(f"unknown random model {name!r}; use one of {known}, {DEMO}, or a model folder")
    where = device or torch.device("cpu")
    folder = bench_cache() / f"random-{key}-v{_RECIPE_VERSION}{'' if where.type == 'cpu' else '-' + where.type}"
    return _built(folder, "random model", lambda empty: build_model(SHAPES[key], empty, device=where))


def _built(folder: Path, what: str, build: Callable[[Path], None]) -> str:
    """A folder of the cache, built if it is missing."""
    try:
        build_folder(folder, build)
    except OSError as error:
        raise OutputError(f"cannot write the {what} {folder}: {error.strerror or error}") from None
    return str(folder)


def bench_cache() -> Path:
    """Cache folder of generated models and adapters."""
    return cache_folder("bench")


def build_model(shape: Shape, folder: Path, seed: int = 0, device: torch.device | None = None) -> None:
    """Write a Hugging Face folder: random bfloat16 weights, generated on `device` (CPU if None), and a tokenizer."""
    generator = torch.Generator(device or torch.device("cpu")).manual_seed(seed)
    tensors = {name: _draw(name, size, generator) for name, size in _tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))


def _tokenizer(vocab: int) -> Tokenizer:
    """A BPE tokenizer without merges: all bytes, then strings of two letters or digits, of three, and so on.

    Token lengths are similar to those of a trained vocabulary. Ids 0 to 2 are special tokens, as in `_config`.
    """
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for length in itertools.count(2):
        words += map("".join, itertools.islice(itertools.product(_LETTERS, repeat=length), vocab - len(words)))
        if len(words) >= vocab:
            break
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words[:vocab])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    return tokenizer


_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": [_CLASSES[shape.family]],
        "model_type": shape.family,
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
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape.fields,
    }


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name of each tensor -> its size."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # slow, and built models need none of it

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[shape.family](**_config(shape)), trust_remote_code=False
        )
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return {name: size for name, size in stored.items() if not (shape.tied and name == "lm_head.weight")}


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random weights scaled like those of a trained model, so that outputs depend on the whole prompt.

    With the default initialisation of transformers the tied embedding dominates the layers and every row repeats its
    last token, so that the correctness gate would detect nothing.
    """
    values = torch.randn(size, generator=generator, device=generator.device)
    if len(size) == 1:  # steps of recurrent layers are short, so that states last
        return ((-4.0 if name.endswith("dt_bias") else 1.0) + 0.1 * values).to(torch.bfloat16)
    scale = 0.02 if name == "model.embed_tokens.weight" else math.prod(size[1:]) ** -0.5
    return (values * scale).to(torch.bfloat16)


def adapter_folders(model: str, adapters: AdapterSet) -> list[tuple[str, str]]:
    """(name, folder) of each adapter; builds the ones that the cache folder lacks.

    Raises:
        UsageError: the model has none of the adapted linear layers.
        OutputError: the cache folder is not writable.
    """
    sizes = _linear_sizes(model)
    recipe = json.dumps([_ADAPTER_VERSION, adapters.rank, sorted(sizes.items())])
    root = bench_cache() / f"lora-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    build = partial(_build_adapter, sizes, adapters.rank)
    return [
        (adapters.name(number), _built(root / str(number), "adapter", partial(build, number)))
        for number in range(adapters.count)
    ]


def adapter_parameters(model: str, rank: int) -> int:
    """Number of parameters of one adapter: r (I + O) for every adapted layer [O, I]."""
    return sum(rank * (outer + inner) for outer, inner in _linear_sizes(model).values())


def _build_adapter(sizes: Mapping[str, tuple[int, int]], rank: int, seed: int, folder: Path) -> None:
    """Write an adapter folder in peft's layout: float32 A [r, I] and B [O, r] for every module [O, I], scale 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outer, inner) in sizes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) * inner**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) * _B_SCALE
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in sizes})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "inference_mode": True}))


def merge_adapter(model: str, adapter: str, folder: Path) -> None:
    """Write the model with every adapted W replaced by W + B A, in float32: the reference for rows of the adapter.

    Args:
        model: folder of the checkpoint.
        adapter: folder written by `_build_adapter`.
        folder: empty folder to write to.
    """
    checkpoint = check_model_folder(model)
    changes = load_file(Path(adapter) / "adapter_model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.files:
        for name, stored in load_file(file).items():
            change = f"base_model.model.{name.removesuffix('.weight')}"
            down = changes.get(f"{change}.lora_A.weight")
            wide = stored.float()
            tensors[name] = wide if down is None else wide + changes[f"{change}.lora_B.weight"] @ down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in checkpoint.path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def _linear_sizes(model: str) -> dict[str, tuple[int, int]]:
    """Module name -> (O, I) of the adapted layers."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, info in check_model_folder(model).tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in _MODULES and len(info.shape) == 2:
            sizes[module] = (info.shape[0], info.shape[1])
    if not sizes:
        raise UsageError(f"workloads with adapters need a model with {', '.join(_MODULES)}; {model} has none of them")
    return dict(sorted(sizes.items()))
