"""Routing and experts in PyTorch against those of the transformers library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchgen.kernels.moe import Experts, Gating, Routing, moe_experts, route
from tests.models.tiny import tiny_model


def parts(model_type: str, **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """A router and its experts, of the transformers library."""
    model = tiny_model(model_type, **overrides)
    names = {name for name, _ in model.named_modules()}
    name = next(n for n in sorted(names) if n.endswith(".experts"))
    parent = name.rpartition(".")[0]
    router = next(n for n in (f"{parent}.gate", f"{parent}.router") if n in names)
    return model.get_submodule(router), model.get_submodule(name)


def in_order(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by id, as not every router sorts."""
    order = ids.argsort(1)
    return ids.gather(1, order).long(), weights.gather(1, order).float()


@pytest.mark.parametrize(
    ("model_type", "overrides", "routing"),
    [
        ("mixtral", {"num_local_experts": 8}, Routing(2)),
        ("qwen2_moe", {"num_experts": 6, "norm_topk_prob": False}, Routing(2, renormalise=False)),
        ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}, Routing(3)),
        (
            "deepseek_v3",
            {"n_routed_experts": 16, "num_local_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5},
            Routing(5, "sigmoid", 4, 2, "top2", scale=2.5),
        ),
        ("gpt_oss", {"num_local_experts": 8}, Routing(2)),
    ],
)
def test_routing_equals_transformers(model_type: str, overrides: dict[str, Any], routing: Routing) -> None:
    router: Any = parts(model_type, **overrides)[0]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(x)
        ids, weights = route(logits, routing, bias)
    got, expected = in_order(ids, weights), in_order(expected_ids, expected_weights)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_equal_transformers(model_type: str) -> None:
    experts: Any = parts(model_type)[1]
    experts.config._experts_implementation = "eager"
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    ids = torch.rand(9, 4, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :2]
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(3))
    gate_up, down, biases, gating = experts.gate_up_proj, experts.down_proj, (None, None), Gating()
    if model_type == "gpt_oss":
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
        gating = Gating("quick_gelu", interleaved=True, limit=experts.limit, shift=1.0)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        got = moe_experts(x, ids, weights, Experts(gate_up, down, *biases, gating))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
