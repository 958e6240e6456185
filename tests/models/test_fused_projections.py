"""Stacked projections of transformers models, against the separate projections."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchgen.kernels.layouts import choose_layout
from batchgen.kernels.linear import Linear
from batchgen.models.library.layers.fused_projections import stack_projections
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import save_tiny

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 32, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)
        self.gate_proj = nn.Linear(24, 17, bias=bias)
        self.up_proj = nn.Linear(24, 17, bias=bias)
        self.down_proj = nn.Linear(17, 24, bias=bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return (*parts, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_stacking_does_not_change_the_output(bias: bool) -> None:
    block = Block(bias).double()  # a dtype that is never repacked, to test the stacking only
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    expected = block(x)
    assert stack_projections(block) == 2
    for _ in range(2):
        for ours, theirs in zip(block(x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=0)


@torch.no_grad()
def test_one_product_computes_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    original = Linear.__call__

    def count(self: Linear, x: torch.Tensor) -> torch.Tensor:
        counted.append(self.out_features)
        return original(self, x)

    monkeypatch.setattr(Linear, "__call__", count)
    block = Block()
    stack_projections(block)
    block(torch.randn(1, 3, 24))
    assert sorted(counted, reverse=True)[:2] == [48, 34]
    assert len(counted) == (2 if choose_layout(torch.float32, "measured").name == "plain" else 3)


@torch.no_grad()
def test_parts_in_any_order_and_of_different_inputs() -> None:
    plain, stacked = Block(), Block()
    stacked.load_state_dict(plain.state_dict())
    stack_projections(stacked)
    inputs = [torch.randn(2, 24) for _ in range(3)]
    order = [("k", 0), ("q", 1), ("q", 0), ("v", 0), ("v", 0), ("k", 2), ("v", 2), ("q", 2), ("q", 2), ("k", 1)]
    for name, i in order:
        ours = getattr(stacked, f"{name}_proj")(inputs[i])
        torch.testing.assert_close(ours, getattr(plain, f"{name}_proj")(inputs[i]), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_input_is_freed_after_all_parts_are_read() -> None:
    block, x = Block(), torch.randn(1, 3, 24)
    stack_projections(block)
    held = weakref.ref(x)
    block(x)
    del x
    assert held() is None


@torch.no_grad()
def test_weights_remain_readable() -> None:
    block = Block(bias=True)
    before = {name: (m.weight.clone(), m.bias.clone()) for name, m in block.named_children()}
    stack_projections(block)
    for name, module in block.named_children():
        assert torch.equal(module.weight, before[name][0])
        assert torch.equal(module.bias, before[name][1])


@torch.no_grad()
def test_other_modules_are_not_replaced() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), Scaled(8, 8), nn.Linear(8, 8)
            self.gate_proj, self.up_proj = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    odd = Odd()
    x = torch.randn(3, 8)
    expected = [module(x) for module in odd.children()]
    odd.v_proj.register_forward_hook(lambda *_: None)
    assert stack_projections(odd) == 0
    assert type(odd.k_proj) is Scaled
    assert type(odd.v_proj) is nn.Linear
    for module, theirs in zip(odd.children(), expected, strict=True):
        torch.testing.assert_close(module(x), theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "groups"), [("llama", 6), ("phi", 3), ("phi3", 0), ("gemma2", 6), ("olmo2", 6)])
def test_stacking_in_library_models_changes_no_logit(
    name: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchgen.models.library import load as hf_load
    from batchgen.models.library.probe import ProbeAttention

    save_tiny(name, tmp_path)
    counts: list[int] = []
    monkeypatch.setattr(hf_load, "stack_projections", lambda model, products: counts.append(stack_projections(model)))
    stacked = hf_load_model(tmp_path)
    monkeypatch.setattr(hf_load, "stack_projections", lambda model, products: 0)
    plain = hf_load_model(tmp_path)
    assert counts == [groups]
    sequences = random_sequences(256, lengths=(9,))
    ours, theirs = (
        packed_logits(m, sequences, lambda _, probe=ProbeAttention(): probe)[0]  # type: ignore[misc]  # noqa: B008
        for m in (stacked, plain)
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def hf_load_model(folder: Path):  # type: ignore[no-untyped-def]
    from tests.models.loading import load_model

    return load_model(folder, implementation="transformers", dtype="float32", device="cpu")


@torch.no_grad()
def test_a_layer_is_freed_before_the_next_one_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Block().double(), Block().double())
    first = weakref.ref(model[0].q_proj)
    alive: list[bool] = []

    def seen(*arguments: object, **options: object) -> Linear:
        alive.append(first() is not None)
        return Linear(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("batchgen.models.library.layers.fused_projections.Linear", seen)
    stack_projections(model)
    assert alive[0]
    assert not alive[-1]
