"""Adapters that change more than linear layers by low rank, on both paths against peft."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from batchgen.errors import ModelError, UsageError
from batchgen.kernels.backend import TORCH
from batchgen.models.deterministic import deterministic_model
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.models.adapters import KINDS, adapted_logits, base_model, edit_config, edit_weights, save_adapter
from tests.models.dense_attention import DenseCache
from tests.models.loading import inspect_model, load_model
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import VOCAB, save_tiny
from tests.models.tiny_packed import save_packed, text_logits

QV = ["q_proj", "v_proj"]
MORE: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "r": 3, "lora_alpha": 7, "target_modules": [*QV, "o_proj", "up_proj", "down_proj"]},
    "dora all": {"use_dora": True, "target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"k_proj": 2}},
    "ends": {"r": 4, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora ends": {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "bias": {"lora_bias": True, "r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj", "o_proj", "lm_head"]},
    "saved": {"r": 2, "target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head": {"r": 2, "target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": QV, "trainable_token_indices": [3, 17, 200, *range(30, 90)]},
    "tokens of each": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [*range(9, 80)], "lm_head": [4]},
    },
}
TIED = {"tie_word_embeddings": True}
CASES = [
    ("qwen2", "native", {}),
    ("llama", "native", TIED),
    ("llama", "transformers", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", "native", {}),
            ("llama", "transformers", TIED),
            ("qwen2", "transformers", {}),
            ("gemma3_text", "transformers", {}),
        )
    ),
]


def check(base: Path, implementation: Any, kinds: dict[str, dict[str, Any]], folder: Path) -> None:
    """Sequences of every adapter, and one without, in packed steps."""
    paths = [save_adapter(base, folder / f"a{i}", seed=i, **kind) for i, kind in enumerate(kinds.values())]
    lora = [(name, str(path)) for name, path in zip(kinds, paths, strict=True)]
    model = load_model(base, implementation=implementation, dtype="float32", device="cpu", lora=lora)
    adapters = [-1, *range(len(paths)), -1]
    sequences = random_sequences(VOCAB, lengths=tuple(5 + 3 * (i % 4) for i in range(len(adapters))))
    got = packed_logits(model, sequences, DenseCache().step, adapters=adapters)
    plain = adapted_logits(base, None, sequences)
    for i, adapter in enumerate(adapters):
        expected = plain[i] if adapter < 0 else adapted_logits(base, paths[adapter], [sequences[i]])[0]
        torch.testing.assert_close(
            got[i], expected, atol=2e-4, rtol=1e-4, msg=lambda m, i=i: f"{lora[adapters[i]]}: {m}"
        )
        assert adapter < 0 or (expected - plain[i]).abs().max() > 0.05, "the adapter has no effect"
    without = packed_logits(model, sequences, DenseCache().step)
    for ours, theirs in zip(without, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.field("lora_path")
@pytest.mark.parametrize(("model_type", "implementation", "options"), CASES, ids=str)
def test_logits_equal_peft(tmp_path: Path, model_type: str, implementation: Any, options: dict[str, Any]) -> None:
    base = save_tiny(model_type, tmp_path / "base", **options)
    check(base, implementation, {**MORE, "plain": KINDS["two"]}, tmp_path)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"ends": MORE["ends"], "saved": MORE["saved"], "tokens": MORE["tokens"]}),
        (TIED, {"plain": KINDS["two"], "tokens": MORE["tokens"]}),
    ],
    ids=["untied", "tied"],
)
def test_tying_that_ties_nothing_changes_nothing(
    tmp_path: Path, options: dict[str, Any], kinds: dict[str, dict[str, Any]]
) -> None:
    base = save_tiny("llama", tmp_path / "base", **options)
    tying = {name: {**kind, "ensure_weight_tying": True} for name, kind in kinds.items()}
    check(base, "native", tying, tmp_path)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("kind", ["ends", "saved head"])
def test_tied_changes_are_refused(tmp_path: Path, kind: str, implementation: Any) -> None:
    base = save_tiny("llama", tmp_path / "base", **TIED)
    adapter = save_adapter(base, tmp_path / "a", **MORE[kind])
    edit_config(adapter, ensure_weight_tying=True)
    with pytest.raises(ModelError, match=r"the head \(ensure_weight_tying\), which is not supported; merge"):
        inspect_model(base, implementation=implementation, device="cpu", lora=[("a", str(adapter))])


def test_a_bias_of_what_is_not_a_linear_layer_is_refused(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "a", r=2, target_modules=["embed_tokens"])
    edit_config(adapter, lora_bias=True)
    name = "base_model.model.model.embed_tokens.lora_B.bias"
    edit_weights(adapter, lambda weights: {**weights, name: torch.zeros(64)})
    with pytest.raises(ModelError, match=r"bias \(lora_bias\) for model.embed_tokens, which is not a linear layer"):
        inspect_model(base, device="cpu", lora=[("a", str(adapter))])


def test_any_module_of_a_library_model_may_be_replaced(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    kinds = {
        "norms": {"target_modules": QV, "modules_to_save": ["norm", "input_layernorm"]},
        "blocks": {"target_modules": QV, "modules_to_save": ["mlp", "o_proj"]},
    }
    check(base, "auto", kinds, tmp_path)


@torch.no_grad()
def test_names_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """An adapter of the whole model, whose towers text does not run, on the text part that runs natively."""
    whole = save_packed("llava", tmp_path / "base")
    config = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    made = get_peft_model(whole, config)
    for name, weight in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            weight += 0.15 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    made.save_pretrained(tmp_path / "a")
    model = load_model(tmp_path / "base", dtype="float32", device="cpu", lora=[("a", str(tmp_path / "a"))])
    assert model.spec.implementation == "native"
    ids = random_sequences(model.spec.vocab_size, lengths=(9,))
    (got,) = packed_logits(model, ids, DenseCache().step, adapters=[0])
    torch.testing.assert_close(got, text_logits(made, ids[0]), atol=2e-4, rtol=1e-4)
    with made.disable_adapter():
        assert (got - text_logits(made, ids[0])).abs().max() > 0.1


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, dict[str, Any]] = {
    "both": {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj"], "target_parameters": FUSED},
    "one": {"r": 3, "target_parameters": FUSED[:1], "use_rslora": True},
    "down": {"r": 2, "target_modules": QV, "target_parameters": FUSED[1:]},
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_experts_equal_peft(tmp_path: Path, model_type: str) -> None:
    base = save_tiny(model_type, tmp_path / "base")
    kinds = EXPERTS if model_type != "qwen3_moe" else {**EXPERTS, "linear": {"r": 2, "target_modules": "all-linear"}}
    check(base, "auto", {**kinds, "plain": KINDS["two"]}, tmp_path)


MIXERS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_next": {
        "linear": {"r": 3, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", *QV, "down_proj"]},
        "dora": {"r": 2, "use_dora": True, "target_modules": ["in_proj_qkvz", "out_proj", "o_proj"]},
    },
    "falcon_h1": {"linear": {"r": 3, "target_modules": ["in_proj", "o_proj", *QV]}},
    "jamba": {"linear": {"r": 2, "target_modules": ["in_proj", "x_proj", *QV]}},
}


@pytest.mark.parametrize("model_type", MIXERS)
def test_projections_of_recurrent_layers_equal_peft(model_type: str, tmp_path: Path) -> None:
    base = save_tiny(model_type, tmp_path / "base", **HYBRIDS[model_type])
    check(base, "auto", MIXERS[model_type], tmp_path)


def test_a_layer_whose_weight_alone_the_library_reads_is_refused(tmp_path: Path) -> None:
    base = save_tiny("jamba", tmp_path / "base", **HYBRIDS["jamba"])
    adapter = save_adapter(base, tmp_path / "a", r=2, target_modules=["dt_proj"])
    with pytest.raises(ModelError, match=r"does not run model.layers.0.mamba.dt_proj; merge the adapter"):
        load_model(base, device="cpu", lora=[("a", str(adapter))])


@pytest.mark.parametrize(
    ("model_type", "block", "names"),
    [("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")), ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"))],
)
def test_an_adapter_of_single_experts(tmp_path: Path, model_type: str, block: str, names: tuple[str, str, str]) -> None:
    """As peft saved them while experts were separate modules; the reference has them merged into its weights."""
    base = save_tiny(model_type, tmp_path / "base")
    folder = save_adapter(base, tmp_path / "a", r=2, lora_alpha=3, target_modules=["q_proj"])
    whole = PeftModel.from_pretrained(base_model(base), folder).merge_and_unload()
    edit_config(folder, target_modules=["q_proj", *names])
    random, added = torch.Generator().manual_seed(0), {}
    for layer, expert, name in product(range(2), (0, 2, 3), names):
        experts = whole.model.layers[layer].mlp.experts
        inner = experts.down_proj.shape[2]
        weight = (experts.down_proj if name == names[2] else experts.gate_up_proj).data[expert]
        weight = weight if name == names[2] else weight[:inner] if name == names[0] else weight[inner:]
        down, up = (0.2 * torch.randn(*size, generator=random) for size in ((2, weight.shape[1]), (weight.shape[0], 2)))
        weight += 1.5 * up @ down
        key = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}"
        added |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    edit_weights(folder, lambda weights: {**weights, **added})
    model = load_model(base, dtype="float32", device="cpu", lora=[("a", str(folder))])
    sequences = random_sequences(VOCAB)[:2]
    got = packed_logits(model, sequences, DenseCache().step, adapters=[0, -1])
    with torch.no_grad():
        expected = whole(sequences[0][None]).logits[0]
    torch.testing.assert_close(got[0], expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], adapted_logits(base, None, sequences[1:])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_rows_of_a_changed_head_are_refused_where_bits_must_not_depend_on_the_batch(
    tmp_path: Path, implementation: Any
) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folder = save_adapter(base, tmp_path / "a", **MORE["tokens"])
    options: dict[str, Any] = {"implementation": implementation, "dtype": "float32", "device": "cpu"}
    model = load_model(base, **options, lora=[("a", str(folder))])
    with pytest.raises(UsageError, match="more than linear layers"):
        deterministic_model(model, TORCH)
