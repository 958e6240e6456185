"""The operations of deterministic runs: nothing that a launch is made of may be chosen by how many rows come together.

Every launcher that a model or the sampler reaches is called at many sizes, and what it starts is compared: kernel,
tile, warps, stages. What an operation of this list computes for a row is then a function of that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.chips import compiling_for, known_chips
from batchgen.kernels.gpu import invariant_ops, ops
from batchgen.kernels.gpu.launch import recording
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraSegment, LoraStep
from batchgen.kernels.moe import Experts
from tests.gpu.interpreted import sum_rows_alike
from tests.kernels.gpu import step_sizes

SIZES = (1, 2, 16, 17, 64, 65, 300, 4096)


def started(thunk: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels and their constants, in order."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    with recording(lambda kernel, grid, args, constants: seen.append((kernel, constants))):
        thunk()
    return seen


KINDS = (step_sizes._dense, step_sizes._logits, step_sizes._shaping, step_sizes._drawing)
NAMES = sorted({name for make in KINDS for name, _ in make(2)})


def test_the_list_holds_every_operation() -> None:
    covered = {name.split()[0] for name in NAMES} | {"top_logprobs", "nan_rows", "add_lora", "moe_experts", "route"}
    assert set(invariant_ops.__all__) == set(ops.__all__)
    assert set(invariant_ops.__all__) <= covered


@pytest.mark.parametrize("chip", ["default", *known_chips()])
@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_rows_chooses_what_is_started(name: str, chip: str) -> None:
    seen = []
    with compiling_for(chip):
        for size in SIZES:
            for make in KINDS:
                seen += [started(thunk) for found, thunk in make(size) if found == name]
    assert len(seen) >= len(SIZES)
    assert seen[0]
    assert all(launch == seen[0] for launch in seen)


# Adapters and experts.


def lora_pairs(generator: torch.Generator, inputs: int, outputs: int, ranks: tuple[int, ...]) -> LoraPairs:
    def whole(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, generator=generator).float()

    return LoraPairs([LoraPair(whole(rank, inputs), whole(outputs, rank)) for rank in ranks])


def step_of(adapters: list[int]) -> LoraStep:
    """Cut into tiles of 16 or 64 tokens, by how many there are."""
    own = torch.tensor(adapters)
    return LoraStep(tuple(LoraSegment(a, (own == a).nonzero()[:, 0]) for a in sorted(set(adapters))))


@pytest.mark.parametrize("count", [1, 2, 17, 65, 300])
def test_a_token_s_adapter_gives_the_same_in_any_company(count: int) -> None:
    """Whole numbers, whose sums are exact; and launches whose tiles and parts are the same for one token and many."""
    generator = torch.Generator().manual_seed(0)
    pairs = lora_pairs(generator, 600, 150, (8, 40))
    x = torch.randint(-2, 3, (count, 600), generator=generator).float()
    adapters = ([1] if count == 1 else [0, 1] * count)[:count]
    base = torch.randint(-9, 9, (count, 150), generator=generator).float()
    together = base.clone()
    launches = started(lambda: invariant_ops.add_lora(together, x, step_of(adapters), pairs))
    invariant_ops.add_lora(together, x, step_of(adapters), pairs)
    for token in range(0, count, 7):
        one = base[token : token + 1].clone()
        alone = step_of([adapters[token]])
        assert started(lambda one=one, alone=alone: invariant_ops.add_lora(one, x[:1], alone, pairs)) == launches
        invariant_ops.add_lora(one, x[token : token + 1], alone, pairs)
        assert torch.equal(one[0], together[token])


def test_parts_of_an_adapter_s_inputs_do_not_depend_on_the_step() -> None:
    seen = []
    pairs = lora_pairs(torch.Generator().manual_seed(0), 4096, 256, (16,))

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        seen.append((grid[2] if len(grid) == 3 else args[-1], constants))

    with recording(note):
        for count in (1, 40, 900):
            step = step_of([0] * count)
            invariant_ops.add_lora(torch.zeros(count, 256), torch.zeros(count, 4096), step, pairs)
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert seen[0][0] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_s_experts_give_the_same_in_any_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_rows_alike(monkeypatch.setattr)  # what the activation leaves for the second product is not whole
    generator = torch.Generator().manual_seed(0)

    def whole(*size: int) -> Tensor:
        return torch.randint(-1, 2, size, generator=generator).to(dtype)

    experts = Experts(whole(4, 2 * 20, 24), whole(4, 24, 20))
    x, weights = whole(70, 24), torch.full((70, 2), 0.5)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(70)])
    launches = started(lambda: invariant_ops.moe_experts(x, ids, weights, experts))
    together = invariant_ops.moe_experts(x, ids, weights, experts)
    for token in range(0, 70, 23):
        at = slice(token, token + 1)
        assert started(lambda at=at: invariant_ops.moe_experts(x[at], ids[at], weights[at], experts)) == launches
        assert torch.equal(invariant_ops.moe_experts(x[at], ids[at], weights[at], experts)[0], together[token])
