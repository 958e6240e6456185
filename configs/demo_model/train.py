"""Training of the demonstration model: `python -m configs.demo_model.train --out DIR`.

The seed determines everything: the tokenizer's text, the initial weights, the examples and their order. The default
number of steps takes two CPU cores with bfloat16 instructions less than an hour. DIR contains a complete model after
every stage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchgen.demo.tasks import WEIGHTS
from configs.demo_model.batches import Encoder, batches
from configs.demo_model.evaluate import accuracy, heldout
from configs.demo_model.export import llama_model, load_weights, save
from configs.demo_model.network import Network, Shape
from configs.demo_model.optimizer import Optimizer
from configs.demo_model.tokenizer import train_tokenizer


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of steps with one mixture of tasks. The learning rate warms up and, if `decays`, falls to zero."""

    steps: int
    weights: Mapping[str, int]
    decays: bool = False

    def fraction(self, step: int, warmup: int) -> float:
        """Share of the full learning rate at a step; a decay takes the last three quarters of the stage."""
        if step < warmup:
            return (step + 1) / warmup
        return min(1.0, (self.steps - step) / (0.75 * self.steps)) if self.decays else 1.0


_DRILL = {
    "arithmetic": 60,
    "sort": 12,
    "copy": 24,
    "extract": 4,
    "classify": 2,
    "question": 6,
    "few_shot": 6,
    "word_facts": 4,
}
_LAST = {
    "arithmetic": 22,
    "sort": 18,
    "copy": 18,
    "extract": 10,
    "classify": 6,
    "question": 18,
    "few_shot": 16,
    "word_facts": 10,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of the training.

    Sums and exact copies are the slowest to learn, so the second stage has more of them.
    """

    seed: int = 0
    stages: tuple[Stage, ...] = (Stage(2800, WEIGHTS), Stage(1400, _DRILL), Stage(5200, _LAST, decays=True))
    tokens_per_step: int = 2048
    warmup: int = 150
    muon_rate: float = 0.015
    adam_rate: float = 0.005
    clip: float = 1.0
    shape: Shape = field(default_factory=Shape)


def train(recipe: Recipe, out: Path, evaluate_every: int, per_task: int, first: int = 0) -> None:
    """Train by the recipe, write the model to `out` and progress to standard error.

    Every stage starts from the saved weights of the previous one, with a new optimiser and data stream. A training that
    stopped between two stages can therefore be resumed from `out` with `first`, with the same result.
    """
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(recipe.seed)
    network = Network(recipe.shape)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    _report(event="start", parameters=parameters, vocabulary=len(tokenizer))
    for number, stage in enumerate(recipe.stages[first:], first):
        if number:
            load_weights(network, out)
        _run_stage(recipe, number, stage, network, tokenizer, out, evaluate_every)
        _evaluate(network, tokenizer, stage.steps, per_task)


def _run_stage(
    recipe: Recipe, number: int, stage: Stage, network: Network, tokenizer: Any, out: Path, evaluate_every: int
) -> None:
    """Train one stage and save the model."""
    optimizer = Optimizer(network, recipe.muon_rate, recipe.adam_rate)
    stream = batches(Encoder(tokenizer), recipe.seed + number, recipe.tokens_per_step, stage.weights)
    began, seen, recent = time.monotonic(), 0, 0.0
    for step in range(stage.steps):
        batch = next(stream)
        loss = network.loss(batch.tokens, batch.groups, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
        optimizer.step(stage.fraction(step, recipe.warmup))
        seen += batch.real_tokens
        recent += loss.item()
        done = step + 1
        if done % 50 == 0:
            seconds = round(time.monotonic() - began)
            _report(event="step", stage=number, step=done, loss=round(recent / 50, 4), tokens=seen, seconds=seconds)
            recent = 0.0
        if done % evaluate_every == 0 and done < stage.steps:
            _evaluate(network, tokenizer, done, 20)
    save(network, tokenizer, out)


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
    parser.add_argument("--first", type=int, default=0, help="stage to resume with, from the model in --out")
    parser.add_argument("--seed", type=int, default=standard.seed)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=500)
    parser.add_argument("--per-task", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    train(Recipe(seed=options.seed), options.out, options.evaluate_every, options.per_task, options.first)


if __name__ == "__main__":
    main()
