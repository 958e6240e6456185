"""Loading of models: shards, dtypes, peak memory and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.errors import ModelError
from batchgen.models.base import Model, ModelInput
from batchgen.models.checkpoint.safetensors_header import read_header
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.library.probe import ProbeAttention
from tests.models.loading import inspect_model, load_model
from tests.models.tiny import NATIVE_TYPES, save_tiny

torch.set_num_threads(1)
HAS_BF16 = bool(torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("amx_bf16"))


def logits(folder: Path, **options: object) -> torch.Tensor:
    return logits_of(load_model(folder, device="cpu", **{"dtype": "float32", **options}))  # type: ignore[arg-type]


def logits_of(model: Model) -> torch.Tensor:
    ids = torch.arange(3, 15)
    return model.logits(model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention()))).float()


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_shards_equal_the_single_file(implementation: str, tmp_path: Path) -> None:
    single = save_tiny("qwen3", tmp_path / "single")
    sharded = save_tiny("qwen3", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 4
    options = {"implementation": implementation}
    assert torch.equal(logits(single, **options), logits(sharded, **options))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_loaded_model_does_not_follow_its_files(implementation: str, tmp_path: Path) -> None:
    """Files of the model's own dtype could be mapped: then a change would show, and a short file end the process."""
    folder = save_tiny("llama", tmp_path)
    model = load_model(folder, implementation=implementation, dtype="float32", device="cpu", products="torch")  # type: ignore[arg-type]
    expected = logits_of(model)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(logits_of(model), expected)


Tensors = dict[str, torch.Tensor]
STORED: dict[str, Callable[[Tensors], Tensors]] = {
    "bare decoder": lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()},
    "only the head": lambda t: t | {"lm_head.weight": t.pop("model.embed_tokens.weight")},
    "rotary frequencies": lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
}
"""Other ways to store the tensors of a tied checkpoint."""


@pytest.mark.parametrize("name", STORED)
def test_other_names_of_stored_tensors(name: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=True)
    expected = logits(folder)
    save_file(STORED[name](load_file(folder / "model.safetensors")), folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_tied_checkpoint_with_a_different_head(implementation: str, tmp_path: Path) -> None:
    """The stored head is used, as in transformers."""
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=True)
    tied = logits(folder, implementation=implementation)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(folder, implementation=implementation), 2 * tied, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("stored", "expected", "named"),
    [
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16 if HAS_BF16 else torch.float32, False),
        (torch.float16, torch.bfloat16 if HAS_BF16 else torch.float32, True),
    ],
)
def test_auto_dtype_on_a_cpu(stored: torch.dtype, expected: torch.dtype, named: bool, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, dtype=stored)
    config = json.loads((tmp_path / "config.json").read_text())
    if not named:
        config.pop("dtype")
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, device="cpu")
    assert model.spec.dtype == expected
    hidden = model.hidden(ModelInput(torch.tensor([5]), torch.tensor([0]), ProbeAttention()))
    assert hidden.dtype == expected


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_float16_runs_on_a_cpu(implementation: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    half = logits(tmp_path, dtype="float16", implementation=implementation)
    full = logits(tmp_path, implementation=implementation)
    assert (half - full).norm() < 0.05 * full.norm()


def test_auto_selects_the_native_path_for_supported_models(tmp_path: Path) -> None:
    for name in NATIVE_TYPES:
        assert inspect_model(save_tiny(name, tmp_path / name)).implementation == "native"
    assert inspect_model(save_tiny("gemma2", tmp_path / "gemma2")).implementation == "transformers"
    assert inspect_model(save_tiny("llama", tmp_path / "relu2", hidden_act="relu2")).implementation == "transformers"


def test_native_is_rejected_for_unsupported_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not have the architecture gemma2.*--model-impl"):
        load_model(save_tiny("gemma2", tmp_path / "a"), implementation="native")
    with pytest.raises(ModelError, match=r"activation relu2.*--model-impl transformers"):
        load_model(save_tiny("llama", tmp_path / "b", hidden_act="relu2"), implementation="native")


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_context_may_be_shortened_only(implementation: Any, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert load_model(tmp_path, max_model_len=100, implementation=implementation).spec.context_length == 100
    with pytest.raises(ModelError, match=r"--max-model-len 513 is past the model's context of 512"):
        load_model(tmp_path, max_model_len=513, implementation=implementation)
    with pytest.raises(ModelError, match=r"--max-model-len must be at least 1"):
        inspect_model(tmp_path, max_model_len=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_device_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        load_model(save_tiny("llama", tmp_path), device="cuda")


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_reader_converts_like_torch(
    stored: torch.dtype, target: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.models.checkpoint.weights._BUFFER_BYTES", 64)  # many pieces
    tensor = torch.randn(13, 7).to(stored)
    save_file({"a": torch.ones(3), "b": tensor}, tmp_path / "x.safetensors")
    tensors, _ = read_header(tmp_path / "x.safetensors")
    out = torch.full((20, 7), torch.nan, dtype=target)
    with WeightReader(tensors) as reader:
        reader.read_into("b", out[4:17])
    assert torch.equal(out[4:17], tensor.to(target))
    assert out[:4].isnan().all()
    assert out[17:].isnan().all()


PEAK = """
import json, os, sys
from tests.models.loading import load_model
import torch
torch.set_num_threads(1)
def status(key):
    for line in open('/proc/self/status'):
        if line.startswith(key + ':'): return int(line.split()[1]) * 1024
def measure(small, large, dtype):
    load_model(small, dtype=dtype, device='cpu')  # do not count imported libraries
    open('/proc/self/clear_refs', 'w').write('5')
    before = status('VmRSS')
    model = load_model(large, dtype=dtype, device='cpu')
    print(status('VmHWM') - before, status('VmRSS') - before, model.spec.parameters, flush=True)
for case in json.loads(sys.argv[1]):
    if not os.fork():
        measure(*case)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[int]]:
    """By type and dtype: the bytes at the peak of loading a large model and after it, and its parameters."""
    folder, cases = tmp_path_factory.mktemp("memory"), {}
    write_large(folder / "large")
    small = save_tiny("llama", folder / "small", dtype=torch.bfloat16)
    cases |= {("large", dtype): (small, folder / "large", dtype) for dtype in ("bfloat16", "float32")}
    for model_type in ("llama", "gemma3_text"):
        sizes = {"vocab_size": 40_000, "hidden_size": 512, "tie_word_embeddings": True}
        pair = save_tiny(model_type, folder / f"a{model_type}"), save_tiny(model_type, folder / model_type, **sizes)
        cases[model_type, "float32"] = (*pair, "float32")
    command = [sys.executable, "-c", PEAK, json.dumps(list(cases.values()), default=str)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    return {case: [*map(int, line.split())] for case, line in zip(cases, done.stdout.splitlines(), strict=True)}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory through /proc")
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_peak_memory_is_the_weights_and_one_matrix(
    dtype: str, width: int, memory: dict[tuple[str, str], list[int]]
) -> None:
    peak, _, parameters = memory["large", dtype]
    matrix, embedding = 2 * 3072 * 1024 * width, 1024 * 1024 * width
    # In addition to the weights: the matrix being repacked, the stored one being converted and the allocator's slack,
    # in total less than two matrices.
    slack = (12 << 20) + (0 if dtype == "bfloat16" else 3072 * 1024 * 2)
    assert embedding + slack < 1.2 * matrix
    assert parameters * width > 4 * (matrix + embedding + slack) / 2, "the model is too small for this test"
    assert parameters * width < peak < parameters * width + matrix + embedding + slack


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory through /proc")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_tied_embedding_is_in_memory_once(model_type: str, memory: dict[tuple[str, str], list[int]]) -> None:
    _, held, parameters = memory[model_type, "float32"]
    embedding = 40_000 * 512 * 4
    assert embedding > 0.8 * parameters * 4
    assert parameters * 4 < held < parameters * 4 + embedding / 3


def write_large(folder: Path) -> None:
    """Write a model of about 66 million bfloat16 parameters without initialising it."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(1024, 1024), "model.norm.weight": torch.ones(1024)}
    for i in range(5):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(1024)
        for name, rows in (("q", 1024), ("k", 256), ("v", 256), ("o", 1024)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = torch.zeros(rows, 1024)
        for name, shape in (("gate", (3072, 1024)), ("up", (3072, 1024)), ("down", (1024, 3072))):
            tensors[f"{at}mlp.{name}_proj.weight"] = torch.zeros(shape)
    save_file({name: t.bfloat16() for name, t in tensors.items()}, folder / "model.safetensors")
