"""LoRA adapters on both model paths against peft, and folders that are rejected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from batchgen.errors import ModelError
from batchgen.kernels.device import HOST
from batchgen.kernels.gpu import lora as kernels
from batchgen.kernels.lora import lora_step
from batchgen.kernels.ops import TORCH_OPS
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.checkpoint.file_hashes import FileStamp
from batchgen.models.lora.config import Adapter, by_pattern
from tests.models.adapters import KINDS, adapted_logits, edit_config, edit_weights, save_adapter
from tests.models.loading import inspect_model, load_model
from tests.models.packed import PagedCache, packed_logits, random_sequences
from tests.models.tiny import NATIVE_TYPES, VOCAB, save_tiny

OTHERS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{"target_modules": "all-linear"}, {"target_modules": ["c_attn"], "r": 3}],
    "phi3": [{"target_modules": "all-linear"}, {"target_modules": ["qkv_proj", "down_proj"], "r": 5}],
    "gemma2": [KINDS["all"], KINDS["regex"]],
    "cohere2": [KINDS["two"], KINDS["some"]],
    "gpt_neox": [{"target_modules": ["query_key_value", "dense"]}, {"target_modules": "all-linear", "r": 2}],
    "qwen2_moe": [KINDS["two"], {"target_modules": r".*\.shared_expert\..*_proj", "r": 3}],
}
"""Types of the transformers path with other names and layouts of linear layers, one with experts."""
CASES = [(name, "native", list(KINDS.values())) for name in NATIVE_TYPES]
CASES += [("llama", "transformers", list(KINDS.values()))]
CASES += [(name, "transformers", kinds) for name, kinds in OTHERS.items()]


@pytest.mark.field("lora_path")
@pytest.mark.parametrize(("model_type", "implementation", "kinds"), CASES, ids=lambda v: v if type(v) is str else "")
def test_logits_equal_peft(tmp_path: Path, model_type: str, implementation: Any, kinds: list[dict[str, Any]]) -> None:
    """Several adapters and a sequence without one in a packed batch of chunks and decoded tokens."""
    base = save_tiny(model_type, tmp_path / "base")
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds)]
    model = load_model(
        base,
        implementation=implementation,
        dtype="float32",
        device="cpu",
        lora=[(f"a{i}", str(path)) for i, path in enumerate(paths)],
    )
    assert model.spec.implementation == implementation
    assert list(model.spec.adapters) == [f"a{i}" for i in range(len(paths))]
    sequences = random_sequences(VOCAB)
    adapters = [i % (len(paths) + 1) - 1 for i in range(len(sequences))]
    got = packed_logits(model, sequences, PagedCache(model.spec, len(sequences)).step, adapters=adapters)
    plain = adapted_logits(base, None, sequences)
    for i, adapter in enumerate(adapters):
        expected = plain[i] if adapter < 0 else adapted_logits(base, paths[adapter], [sequences[i]])[0]
        torch.testing.assert_close(got[i], expected, atol=1e-4, rtol=1e-4)
        assert adapter < 0 or (expected - plain[i]).abs().max() > 0.1, "the adapter has no effect"


def test_step_without_adapted_rows_equals_the_plain_model(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "a", **KINDS["all"])
    sequences = random_sequences(VOCAB)
    for implementation in ("native", "transformers"):
        options: dict[str, Any] = {"implementation": implementation, "dtype": "float32", "device": "cpu"}
        plain, adapted = load_model(base, **options), load_model(base, **options, lora=[("a", str(adapter))])
        results = [packed_logits(m, sequences, PagedCache(m.spec, len(sequences)).step) for m in (plain, adapted)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_kernel_for_all_adapters_equals_plain_operations(base: Path, tmp_path: Path, implementation: Any) -> None:
    kinds = [KINDS["all"], KINDS["some"], KINDS["two"]]
    paths = [save_adapter(base, tmp_path / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds)]
    adapters = [(f"a{i}", str(path)) for i, path in enumerate(paths)]
    model = load_model(base, implementation=implementation, dtype="float32", device="cpu", lora=adapters)
    lengths, ids = (4, 7, 3, 2), (torch.arange(16) * 37 + 5) % VOCAB
    step = lora_step(np.repeat([1, -1, 0, 2], lengths), HOST)
    positions = torch.cat([torch.arange(n) for n in lengths])

    def hidden(add: Callable[..., None]) -> torch.Tensor:
        ops = replace(TORCH_OPS, add_lora=add)
        attention = PagedCache(model.spec, len(lengths)).step(list(enumerate(lengths)))
        return model.hidden(ModelInput(ids, positions, attention, lora=step, ops=ops))

    torch.testing.assert_close(hidden(kernels.add_lora), hidden(TORCH_OPS.add_lora), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("lora") / "saved", **KINDS["two"])


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of an adapter that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "a"))


def without(*endings: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {name: w for name, w in weights.items() if not name.endswith(endings)}


def extra(name: str, *shape: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {**weights, name: torch.zeros(*shape)}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"use_dora": True}, r"magnitude of .*q_proj \(lora_magnitude_vector\) does not fit use_dora"),
    ({"use_dora": "yes"}, "use_dora"),
    ({"modules_to_save": 3}, "modules_to_save"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, r"the bias of .*q_proj \(lora_B.bias\) does not fit lora_bias"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ({"something_new": {"x": 1}}, "something_new"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"r": 8}, "q_proj has matrices .* rank 8"),
    ({"r": 0}, "r in adapter_config.json must be a positive number, got 0"),
    ({"r": "4"}, "r in adapter_config.json"),
    ({"lora_alpha": None}, "lora_alpha"),
    ({"rank_pattern": [1]}, "rank_pattern"),
    ({"rank_pattern": {"(": 4}}, "not a valid regular expression"),
    ({"target_modules": None}, "names no target_modules"),
    ({"target_modules": 3}, "target_modules .* must be"),
    ({"target_modules": ["k_proj"]}, "changes .*q_proj, which adapter_config.json does not name"),
    ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "names .*o_proj as a target, but .* does not hold it"),
    ({"layers_to_transform": [0]}, "changes .*layers.1"),
    ({"layers_to_transform": "all"}, "layers_to_transform"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=lambda v: json.dumps(v) if type(v) is dict else "")
def test_unsupported_configurations_are_rejected(
    base: Path, adapter: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(adapter, **changes)
    with pytest.raises(ModelError, match=f"The adapter fr .*{message}"):
        check_model(base, lora=[("fr", str(adapter))])


FIRST = "base_model.model.model.layers.0.self_attn."
WEIGHTS: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (without("layers.1.self_attn.q_proj.lora_A.weight"), "one of the two matrices of model.layers.1.self_attn.q_proj"),
    (
        without("layers.1.self_attn.q_proj.lora_A.weight", "layers.1.self_attn.q_proj.lora_B.weight"),
        "names model.layers.1.self_attn.q_proj as a target",
    ),
    (without("weight"), "is empty"),
    (extra(FIRST + "q_proj.lora_magnitude_vector", 64), "lora_magnitude_vector"),
    (extra("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64), "trainable_token_ind"),
    (extra("base_model.model.lm_head.weight", 2), "lm_head"),
    (extra(FIRST + "q_proj.lora_A.weight", 4, 63), "maps 64 to 64 features in the model and 63 to 64 in the adapter"),
    (extra(FIRST + "q_proj.lora_A.weight", 3, 64), "rank 4"),
    (extra(FIRST + "q_proj.lora_A.weight", 256), "rank 4"),
    (lambda w: {name: tensor.to(torch.int32) for name, tensor in w.items()}, "stored as I32"),
]


@pytest.mark.parametrize(("change", "message"), WEIGHTS)
def test_wrong_weights_are_rejected(base: Path, adapter: Path, change: Any, message: str) -> None:
    edit_weights(adapter, change)
    with pytest.raises(ModelError, match=message):
        check_model(base, lora=[("fr", str(adapter))])


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_adapters_of_other_models_are_rejected(base: Path, tmp_path: Path, implementation: Any) -> None:
    """Both paths report the error before the model's weights are read."""
    wide = save_tiny("llama", tmp_path / "wide", hidden_size=128)
    deep = save_tiny("llama", tmp_path / "deep", num_hidden_layers=4)
    other = save_tiny("gpt_neox", tmp_path / "other")
    cases = [
        (save_adapter(wide, tmp_path / "1", **KINDS["two"]), "maps 64 to 64 features in the model and 128"),
        (
            save_adapter(deep, tmp_path / "2", **KINDS["two"]),
            "layers.3.self_attn.[qv]_proj, which is not a linear layer",
        ),
        (save_adapter(other, tmp_path / "3", target_modules=["query_key_value"]), "query_key_value, which is not"),
        (save_adapter(wide, tmp_path / "4", target_modules=["lm_head"]), "lm_head maps 64 to 256 features"),
        (save_adapter(wide, tmp_path / "5", target_modules=["embed_tokens"]), "embed_tokens maps 256 to 64 features"),
        (
            save_adapter(wide, tmp_path / "6", target_modules=["q_proj"], modules_to_save=["lm_head"]),
            r"q_proj maps 64|lm_head.weight has shape \[256, 128\], and the model's \[256, 64\]",
        ),
    ]
    for adapter, message in cases:
        with pytest.raises(ModelError, match=message):
            inspect_model(base, implementation=implementation, lora=[("fr", str(adapter))])


def test_missing_and_damaged_files_are_rejected(base: Path, adapter: Path, tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            check_model(base, lora=[("fr", str(folder))])

    refused(tmp_path / "none", "there is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no adapter_config.json")
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    refused(adapter, "damaged")
    file.rename(adapter / "adapter_model.bin")
    refused(adapter, "pickle")
    (adapter / "adapter_model.bin").unlink()
    refused(adapter, "needs adapter_model.safetensors")
    file.write_bytes(whole)
    (adapter / "adapter_config.json").write_text("{")
    refused(adapter, "is not JSON")
    (adapter / "adapter_config.json").write_text("[]")
    refused(adapter, "must hold an object")


def test_experts_of_another_model_are_rejected(tmp_path: Path) -> None:
    moe = save_tiny("mixtral", tmp_path / "moe")
    adapter = save_adapter(moe, tmp_path / "a", **KINDS["two"])
    edit_config(adapter, target_modules=["q_proj", "v_proj", "w1"])
    expert = "base_model.model.model.layers.0.mlp.experts.9.w1."
    edit_weights(adapter, extra(expert + "lora_A.weight", 4, 64))
    with pytest.raises(ModelError, match=r"two matrices of .*experts\.9\.w1"):
        inspect_model(moe, lora=[("fr", str(adapter))])
    edit_weights(adapter, extra(expert + "lora_B.weight", 96, 4))
    with pytest.raises(ModelError, match=r"do not fit model\.layers\.0\.mlp\.experts"):
        inspect_model(moe, lora=[("fr", str(adapter))])


def test_adapters_stored_in_half_precision(base: Path, adapter: Path) -> None:
    edit_weights(adapter, lambda weights: {name: w.bfloat16().contiguous() for name, w in weights.items()})
    model = load_model(base, dtype="float32", device="cpu", lora=[("fr", str(adapter))])
    sequences = random_sequences(VOCAB)[:2]
    got = packed_logits(model, sequences, PagedCache(model.spec, 2).step, adapters=[0, 0])
    for ours, theirs in zip(got, adapted_logits(base, adapter, sequences), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


NAMES = [
    f"{head}{i}.{part}"
    for head in ("model.layers.", "transformer.h.", "layers.", "model.layers.1.experts.", "a.0.blocks.")
    for i in (0, 1, 11)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "down_proj")
] + ["lm_head", "model.embed_tokens", "q_proj"]
TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["mlp.down_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "lm_head"]},
    {"target_modules": r".*(q|k)_proj"},
    {"target_modules": r".*\.1\..*proj", "exclude_modules": r".*down_proj"},
    {"target_modules": r"q_proj"},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 11},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h", "blocks"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["nothing"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
]


@pytest.mark.parametrize("config", TARGETS, ids=json.dumps)
def test_targets_equal_peft(config: dict[str, Any]) -> None:
    theirs = LoraConfig(**config)
    ours = Adapter("a", Path(), {}, config, "", FileStamp(0, 0, 0, 0, 0))
    for name in NAMES:
        found = check_target_module_exists(theirs, name)
        # peft returns a truthy object for an excluded module.
        assert ours.targets(name) == (found is True or isinstance(found, re.Match)), name


PATTERNS: list[dict[str, int]] = [
    {},
    {"q_proj": 2, r"layers\.1\..*": 3},
    {r"layers\.1\..*": 3, "q_proj": 2},
    {"model.layers.0.self_attn.q_proj": 5},
    {"^model.layers.0.self_attn.q_proj": 5, "proj": 7},
    {"layers.1.mlp.down_proj": 4, r".*down_proj": 6},
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=json.dumps)
def test_rank_patterns_equal_peft(pattern: dict[str, int]) -> None:
    for name in NAMES:
        assert by_pattern(pattern, name, 8) == pattern.get(get_pattern_key(list(pattern), name), 8), name
