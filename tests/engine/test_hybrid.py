"""Models with recurrent layers, whose states are kept where prompts branch, against transformers' eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.errors import DeviceError, UsageError
from tests.engine.reference import assert_same, eager_greedy, save_with_words, shared_prefix_prompts
from tests.models.tiny import LINEAR, VOCAB

NEW = 12
SIZE = 4
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_LINEAR = {"layer_types": LINEAR["layer_types"]}
_KIMI = {**_LINEAR, "linear_num_heads": 2, "linear_head_dim": 16, "head_dim": 8}
_SSD = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 8}
_SCAN = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_SHARED = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
_MAMBA = {"state_size": 8, "num_hidden_layers": 2}
TYPES: dict[str, dict[str, Any]] = {
    "lfm2": {**_CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "lfm3": _CONV,
    "lara_mini": {name: value for name, value in LINEAR.items() if name != "layer_types"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), LINEAR),
    "granitemoehybrid": {**_LINEAR, **_SSD},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48,
        "time_step_limit": (0.01, 0.1),
    },
    "bamba": {**_SSD, "attn_layer_indices": [1]},
    "falcon_h1": {**_SSD, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "mamba2": {**_MAMBA, "num_heads": 4, "head_dim": 32, "n_groups": 2, "chunk_size": 16},
    "zamba2": {
        **_SHARED,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
    },
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KIMI),
    "jamba": {**_SCAN, "attn_layer_period": 3, "attn_layer_offset": 1},
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "zamba": {**_SCAN, **_SHARED},
    "minimax": {**_LINEAR, "block_size": 8, "sliding_window": None},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "cca_time0": 3, "attention_bias": True},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 5},
}
"""Type -> fields of its tiny configuration, with recurrent layers."""
LARGE_STATES = {**LINEAR, "linear_key_head_dim": 64, "linear_value_head_dim": 64}


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), page_size=SIZE, **{"dtype": "float32", "max_tokens_per_step": 2048, **options})


_SLOW = (
    "olmo_hybrid",
    "lara_mini",
    "bailing_hybrid",
    "lfm2_moe",
    "lfm3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "bamba",
    "mamba2",
    "falcon_mamba",
    "zamba",
)
"""Types whose parts others have too."""


@pytest.mark.parametrize("model_type", [pytest.param(t, marks=pytest.mark.slow) if t in _SLOW else t for t in TYPES])
def test_hybrids_equal_the_full_forward(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together and alone; shuffled in small chunks; preempted, which goes on from the nearest state that is kept."""
    folder = save_with_words(model_type, tmp_path, **TYPES[model_type])
    prompts = shared_prefix_prompts(12, VOCAB, seed=3)
    expected = eager_greedy(folder, prompts, NEW, use_cache=False)
    everything = list(range(len(prompts)))
    engine = engine_of(folder)
    expected.check(engine, prompts, everything)
    stats = engine.last_run.scheduler.stats
    assert stats.recomputed_tokens == 0
    longest = max(everything, key=lambda i: len(prompts[i]))
    expected.check(engine, prompts, [longest])

    engine = engine_of(folder, max_tokens_per_step=24, max_num_seqs=8)
    expected.check(engine, prompts, everything[::-1])
    expected.check_preempted(engine, prompts, monkeypatch)


@pytest.mark.parametrize(
    ("model_type", "deterministic"),
    [
        ("qwen3_next", False),
        ("qwen3_next", True),
        ("jamba", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("kimi_linear", "falcon_h1", "zaya")),
    ],
)
def test_samples_and_prompt_outputs_do_not_depend_on_the_batch(
    model_type: str, deterministic: bool, tmp_path: Path
) -> None:
    """Bit for bit with `deterministic`."""
    save_with_words(model_type, tmp_path, **TYPES[model_type])
    rows = [
        {
            "input_ids": prompt,
            "sampling_params": {"seed": i, "max_new_tokens": NEW, "ignore_eos": True, "n": 1 + i % 3},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_hidden_states": True,
        }
        for i, prompt in enumerate(shared_prefix_prompts(12, VOCAB, seed=5))
    ]
    expected = list(engine_of(tmp_path, deterministic=deterministic).generate(rows, ordered=True))
    engine = engine_of(tmp_path, max_tokens_per_step=24, max_num_seqs=3, deterministic=deterministic)
    for got, want in zip(engine.generate(rows, ordered=True), expected, strict=True):
        assert_same(got, want, atol=0 if deterministic else 1e-3)


def test_states_are_computed_once_however_few_slots_there_are(tmp_path: Path) -> None:
    """Half of the memory is for states: it holds those of two rows, and of the nodes that they begin at."""
    save_with_words("qwen3_next", tmp_path, **LARGE_STATES)
    prompts = [[7] * 20 + [group] * 8 + [i] for group in range(3, 6) for i in range(3, 9)]
    rows = [{"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}} for prompt in prompts]
    plenty, few = engine_of(tmp_path), engine_of(tmp_path, kv_memory="2MiB")
    wanted = [completion.output_ids for completion in plenty.generate(rows, ordered=True)]
    assert [completion.output_ids for completion in few.generate(rows, ordered=True)] == wanted
    for engine in (plenty, few):
        stats = engine.last_run.scheduler.stats
        assert stats.prompt_tokens == 20 + 3 * 8 + len(rows)
        assert (stats.recomputed_tokens, stats.preemptions, stats.evicted_nodes) == (0, 0, 0)
        assert engine.last_run.kv_peak_bytes["recurrent"] == stats.peak_states * engine.model.spec.state_bytes
    assert few.last_run.scheduler.stats.peak_states < plenty.last_run.scheduler.stats.peak_states


def test_convolutions_have_the_activation_of_the_configuration(tmp_path: Path) -> None:
    save_with_words("mamba", tmp_path, **TYPES["mamba"], hidden_act="gelu")
    prompts = shared_prefix_prompts(4, VOCAB, seed=7)
    expected = eager_greedy(tmp_path, prompts, NEW, use_cache=False)
    expected.check(engine_of(tmp_path), prompts, list(range(len(prompts))))


def test_what_states_do_not_allow_is_refused(tmp_path: Path) -> None:
    save_with_words("qwen3_next", tmp_path, **LARGE_STATES)
    engine = engine_of(tmp_path, kv_memory="1MiB")
    with pytest.raises(UsageError, match=r"holds 3 recurrent states of 1[0-9]+\.[0-9] KiB, at least 6 are needed"):
        list(engine.generate([{"input_ids": [3]}]))
    with pytest.raises(UsageError, match=r"compiled kernels \(they do not compute float16\); leave the option"):
        engine_of(tmp_path, dtype="float16", deterministic=True)


def test_states_and_pages_share_the_memory(tmp_path: Path) -> None:
    """The job's keys and values alone would take 2 MiB."""
    save_with_words("qwen3_next", tmp_path, **LARGE_STATES)
    engine = engine_of(tmp_path, kv_memory="2MiB", max_num_seqs=4)
    rows = [{"input_ids": [i] * 400, "sampling_params": {"max_new_tokens": 1}} for i in range(3, 25)]
    assert all(completion.error is None for completion in engine.generate(rows))
    assert engine.last_run.pool.nbytes <= 2 << 20


def test_a_step_that_does_not_fit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layers have written their states, from which a part of it would go on."""
    save_with_words("lfm2", tmp_path, **TYPES["lfm2"])
    engine = engine_of(tmp_path)

    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.model, "hidden", full)
    with pytest.raises(DeviceError, match="out of memory in a step of 2 tokens, which is not split"):
        list(engine.generate([{"input_ids": [3, 4]}]))
