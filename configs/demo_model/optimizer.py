"""Optimiser: Muon for the matrices of the blocks, AdamW for the embedding and the norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon:
    """Momentum with updates orthogonalised by five Newton-Schulz steps (Jordan et al. 2024).

    Matrices of the same shape are orthogonalised in one batch.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.2) -> None:
        self.stacks: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            self.stacks[tuple(matrix.shape)].append(matrix)
        self.averages = {shape: torch.zeros(len(stack), *shape) for shape, stack in self.stacks.items()}
        self.momentum = momentum
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix by `rate` times its orthogonalised Nesterov momentum, and clear the gradients."""
        for shape, stack in self.stacks.items():
            gradients = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            average = self.averages[shape]
            average.lerp_(gradients, 1 - self.momentum)
            updates = orthogonalised(gradients.lerp(average, self.momentum))
            # An orthogonalised tall matrix has columns of norm 1; the factor keeps the change of its outputs constant.
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, update in zip(stack, updates, strict=True):
                matrix.mul_(1 - rate * self.weight_decay).sub_(update, alpha=scale)
                matrix.grad = None


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """[B, m, n] float32: approximately the nearest semi-orthogonal matrices, with singular values in [0.7, 1.2]."""
    wide = matrices.bfloat16()
    tall = wide.shape[1] > wide.shape[2]
    if tall:
        wide = wide.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    nearest: Tensor = wide.mT if tall else wide
    return nearest.float()


class Optimizer:
    """Both optimisers with a common `step`."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float) -> None:
        blocks = [parameter for name, parameter in model.named_parameters() if "blocks" in name and parameter.ndim == 2]
        chosen = {id(parameter) for parameter in blocks}
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self.muon = Muon(blocks)
        self.adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self.muon_rate = muon_rate
        self.adam_rate = adam_rate

    def step(self, fraction: float) -> None:
        """One update at `fraction` of the full learning rates; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * fraction
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step(self.muon_rate * fraction)
