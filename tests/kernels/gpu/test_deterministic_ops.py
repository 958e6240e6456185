"""The operations of deterministic runs: no parameter of a launch may depend on the number of rows.

Every launcher that a model or the sampler calls is called at many sizes, and its launches are compared: kernel, tile,
warps, stages. The result of an operation for a row is then a function of that row only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.chips import compiling_for, known_chips
from batchgen.kernels.device import device_for
from batchgen.kernels.gpu.launch import recording
from batchgen.kernels.gpu.ops import TRITON_INVARIANT_OPS
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraSegment, LoraStep
from batchgen.kernels.mixers.states import Run, chunk_batches
from batchgen.kernels.moe import Experts
from batchgen.kernels.ops import TORCH_OPS, Ops
from tests.gpu.interpreted import fix_row_summation_order
from tests.kernels.gpu import aot_cases
from tests.kernels.numbers import Numbers
from tests.kernels.op_cases import OPERATIONS

SIZES = (1, 2, 16, 17, 64, 65, 300, 4096)


def recorded_launches(thunk: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """Launched kernels and their constants, in order."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    with recording(lambda kernel, grid, args, constants: seen.append((kernel, constants))):
        thunk()
    return seen


def test_every_operation_is_covered() -> None:
    covered = {name.split("[")[0] for name, _ in aot_cases.by_row(2)} | {"nan_rows", "add_lora", "moe_experts", "route"}
    replaced = {f.name for f in fields(Ops) if getattr(TRITON_INVARIANT_OPS, f.name) != getattr(TORCH_OPS, f.name)}
    assert replaced <= covered


@pytest.mark.parametrize("chip", ["default", *known_chips()])
def test_launches_do_not_depend_on_the_number_of_rows(chip: str) -> None:
    seen: dict[str, list[Any]] = {}
    with compiling_for(chip):
        for size in SIZES:
            for name, thunk in aot_cases.by_row(size):
                seen.setdefault(name, []).append(recorded_launches(thunk))
    for name, launches in seen.items():
        assert launches[0], name
        assert len(launches) >= len(SIZES), name
        assert all(launch == launches[0] for launch in launches), name


# LoRA and MoE.


def lora_pairs(generator: torch.Generator, inputs: int, outputs: int, ranks: tuple[int, ...]) -> LoraPairs:
    def whole(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, generator=generator).float()

    return LoraPairs([LoraPair(whole(rank, inputs), whole(outputs, rank)) for rank in ranks])


def step_of(adapters: list[int]) -> LoraStep:
    """A step in tiles of 16 or 64 tokens, by the number of tokens."""
    own = torch.tensor(adapters)
    return LoraStep(tuple(LoraSegment(a, (own == a).nonzero()[:, 0]) for a in sorted(set(adapters))))


@pytest.mark.parametrize("count", [1, 2, 17, 65, 300])
def test_a_token_s_lora_update_does_not_depend_on_other_tokens(count: int) -> None:
    """Integers, whose sums are exact; and launches with the same tiles and parts for one token and for many."""
    generator = torch.Generator().manual_seed(0)
    pairs = lora_pairs(generator, 600, 150, (8, 40))
    x = torch.randint(-2, 3, (count, 600), generator=generator).float()
    adapters = ([1] if count == 1 else [0, 1] * count)[:count]
    base = torch.randint(-9, 9, (count, 150), generator=generator).float()
    together = base.clone()
    launches = recorded_launches(lambda: TRITON_INVARIANT_OPS.add_lora(together, x, step_of(adapters), pairs))
    TRITON_INVARIANT_OPS.add_lora(together, x, step_of(adapters), pairs)
    for token in range(0, count, 7):
        one = base[token : token + 1].clone()
        alone = step_of([adapters[token]])
        assert (
            recorded_launches(lambda one=one, alone=alone: TRITON_INVARIANT_OPS.add_lora(one, x[:1], alone, pairs))
            == launches
        )
        TRITON_INVARIANT_OPS.add_lora(one, x[token : token + 1], alone, pairs)
        assert torch.equal(one[0], together[token])


def test_parts_of_an_adapter_s_inputs_do_not_depend_on_the_step() -> None:
    seen = []
    pairs = lora_pairs(torch.Generator().manual_seed(0), 4096, 256, (16,))

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        seen.append((grid[2] if len(grid) == 3 else args[-1], constants))

    with recording(note):
        for count in (1, 40, 900):
            step = step_of([0] * count)
            TRITON_INVARIANT_OPS.add_lora(torch.zeros(count, 256), torch.zeros(count, 4096), step, pairs)
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert seen[0][0] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_s_experts_do_not_depend_on_other_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_row_summation_order(monkeypatch.setattr)  # the second product's inputs are not integers
    generator = torch.Generator().manual_seed(0)

    def whole(*size: int) -> Tensor:
        return torch.randint(-1, 2, size, generator=generator).to(dtype)

    experts = Experts(whole(4, 2 * 20, 24), whole(4, 24, 20))
    x, weights = whole(70, 24), torch.full((70, 2), 0.5)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(70)])
    launches = recorded_launches(lambda: TRITON_INVARIANT_OPS.moe_experts(x, ids, weights, experts))
    together = TRITON_INVARIANT_OPS.moe_experts(x, ids, weights, experts)
    for token in range(0, 70, 23):
        at = slice(token, token + 1)
        assert (
            recorded_launches(lambda at=at: TRITON_INVARIANT_OPS.moe_experts(x[at], ids[at], weights[at], experts))
            == launches
        )
        assert torch.equal(TRITON_INVARIANT_OPS.moe_experts(x[at], ids[at], weights[at], experts)[0], together[token])


# Recurrent layers.


@pytest.mark.parametrize("name", ["causal_conv", "linear_attention", "selective_scan"])
def test_a_recurrent_row_does_not_depend_on_how_it_is_cut(name: str) -> None:
    sizes = {
        "causal_conv": {"channels": 40, "width": 4},
        "linear_attention": {"groups": 1, "heads": 2, "key": 16, "value": 24, "delta": 1, "channels": 0},
        "selective_scan": {"channels": 40, "size": 8},
    }[name]
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    given = operation.make(Numbers(torch.device("cpu"), 0), torch.float32, lengths=(40,), **sizes)
    found = []
    for cuts in ([40], [1, 40], [17, 18, 19, 40]):
        states = given["states"].clone()
        runs = [Run(begin, end, 1, 1) for begin, end in pairwise([0, *cuts])]
        arguments = {**given, "states": states, "batches": chunk_batches([runs], device_for(states.device))}
        out = getattr(TRITON_INVARIANT_OPS, name)(*arguments.values())
        found.append((out[:40], states))
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))
