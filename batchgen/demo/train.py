"""Trains the demonstration model from nothing: `python -m batchgen.demo.train --out DIR`.

Everything comes from the seed: the tokenizer's text, the weights' start, the examples and their order. Two CPU cores
with bfloat16 instructions need under an hour for the default number of steps. The folder holds a usable model after
every evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchgen.demo.batches import Encoder, batches
from batchgen.demo.evaluate import accuracy, heldout
from batchgen.demo.export import llama_model, save
from batchgen.demo.network import Network, Shape
from batchgen.demo.optimizer import Optimizer
from batchgen.demo.tokenizer import train_tokenizer


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result."""

    seed: int = 0
    steps: int = 4500
    tokens_per_step: int = 7168
    warmup: int = 100
    hold: float = 0.3
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    clip: float = 1.0
    shape: Shape = field(default_factory=Shape)

    def fraction(self, step: int) -> float:
        """The share of the full learning rate at a step: warm-up, a plateau, then linearly to zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        held = self.hold * self.steps
        return min(1.0, (self.steps - step) / (self.steps - held))


def train(recipe: Recipe, out: Path, evaluate_every: int, per_task: int) -> None:
    """Train by the recipe, writing the model to `out` and progress to standard error."""
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(recipe.seed)
    network = Network(recipe.shape)
    optimizer = Optimizer(network, recipe.muon_rate, recipe.adam_rate)
    stream = batches(Encoder(tokenizer), recipe.seed, recipe.tokens_per_step)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    _report(event="start", parameters=parameters, vocabulary=len(tokenizer))
    began = time.monotonic()
    seen = 0
    for step in range(recipe.steps):
        batch = next(stream)
        loss = network.loss(batch.tokens, batch.groups, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
        optimizer.step(recipe.fraction(step))
        seen += batch.real_tokens
        done = step + 1
        if done % 50 == 0:
            seconds = round(time.monotonic() - began)
            _report(event="step", step=done, loss=round(loss.item(), 4), tokens=seen, seconds=seconds)
        if done % evaluate_every == 0 or done == recipe.steps:
            save(network, tokenizer, out)
            _evaluate(network, tokenizer, done, per_task)
    _report(event="end", tokens=seen, seconds=round(time.monotonic() - began))


def _evaluate(network: Network, tokenizer: Any, step: int, per_task: int) -> None:
    exact = accuracy(llama_model(network, tokenizer), tokenizer, heldout(per_task))
    overall = sum(exact.values()) / len(exact)
    shares = {task: round(share, 3) for task, share in exact.items()}
    _report(event="evaluation", step=step, overall=round(overall, 4), **shares)


def _report(**fields: object) -> None:
    sys.stderr.write(json.dumps(fields) + "\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> None:
    """Train the demonstration model and write it as a Hugging Face folder."""
    standard = Recipe()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=standard.steps)
    parser.add_argument("--seed", type=int, default=standard.seed)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=500)
    parser.add_argument("--per-task", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = Recipe(seed=options.seed, steps=options.steps)
    train(recipe, options.out, options.evaluate_every, options.per_task)


if __name__ == "__main__":
    main()
