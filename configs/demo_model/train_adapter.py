"""Training of the demonstration adapter: `python -m configs.demo_model.train_adapter --out DIR`.

The LoRA adapter makes the demonstration model answer in JSON, `{"answer": "42"}`. The seed and the model determine the
result; one CPU core takes a few minutes. DIR is in peft's layout.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoTokenizer

from batchgen.demo import model_path
from batchgen.demo.tasks import Example, draw
from configs.demo_model.batches import Batch, Document, Encoder, collate
from configs.demo_model.export import BLOCK_NAMES, load_weights
from configs.demo_model.network import Network, Shape

_DECODER: Final = "model.language_model"
"""The language model in the class of the packaged model."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of the training."""

    seed: int = 0
    steps: int = 400
    rank: int = 4
    alpha: int = 8
    tokens_per_step: int = 2048
    rate: float = 0.004
    warmup: int = 20

    def fraction(self, step: int) -> float:
        """Share of the full learning rate at a step: linear warm-up, then linear decay to zero."""
        return min((step + 1) / self.warmup, (self.steps - step) / (self.steps - self.warmup))


class LowRank(nn.Module):
    """Parametrization of a frozen matrix W as W + scale B A."""

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = scale
        self.down = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """[O, I] weight with the low-rank change added."""
        return weight + self.scale * (self.up @ self.down)


def framed(answer: str) -> str:
    """An answer in the adapter's JSON format."""
    return json.dumps({"answer": answer}, ensure_ascii=False)


def _with_framed_answer(example: Example) -> Example:
    """The example with its answer in the adapter's format."""
    chat = example.chat or example.task == "copy"  # plain text to repeat cannot have the format
    return replace(example, chat=chat, content=replace(example.content, answer=framed(example.content.answer)))


def _batches(encoder: Encoder, recipe: Recipe) -> Iterator[Batch]:
    rng = Random(recipe.seed)
    index = 0
    while True:
        lessons = [[_with_framed_answer(draw("train", recipe.seed + 100, index + i))] for i in range(256)]
        index += len(lessons)
        chosen: list[Document] = []
        size = 0
        for document in encoder.documents(lessons):
            chosen.append(document)
            size += len(document.ids)
            if size >= recipe.tokens_per_step:
                yield collate(chosen, rng)
                chosen, size = [], 0


def train(recipe: Recipe, out: Path) -> None:
    """Train by the recipe on top of the packaged model and write the adapter to `out`."""
    torch.manual_seed(recipe.seed)
    network = Network(Shape())
    load_weights(network, model_path())
    network.requires_grad_(False)
    added: dict[str, LowRank] = {}
    for index, block in enumerate(network.blocks):
        for ours, theirs in BLOCK_NAMES.items():
            weight = block.get_parameter(ours)
            if weight.dim() == 2:
                change = LowRank(weight, recipe.rank, recipe.alpha / recipe.rank)
                parametrize.register_parametrization(block, ours, change)
                added[f"{_DECODER}.layers.{index}.{theirs}"] = change
    parameters = [parameter for change in added.values() for parameter in (change.down, change.up)]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.rate, weight_decay=0.0, betas=(0.9, 0.98))
    stream = _batches(Encoder(AutoTokenizer.from_pretrained(model_path())), recipe)
    began, recent = time.monotonic(), 0.0
    for step in range(recipe.steps):
        batch = next(stream)
        loss = network.loss(batch.tokens, batch.groups, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * recipe.fraction(step)
        optimizer.step()
        optimizer.zero_grad()
        recent += loss.item()
        if (step + 1) % 20 == 0:
            seconds = round(time.monotonic() - began)
            sys.stderr.write(json.dumps({"step": step + 1, "loss": round(recent / 20, 4), "seconds": seconds}) + "\n")
            recent = 0.0
    _save(added, recipe, out)


def _save(added: dict[str, LowRank], recipe: Recipe, folder: Path) -> None:
    """Write the matrices in bfloat16 and the configuration that peft reads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for module, change in added.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = change.down.detach().bfloat16()
        weights[f"base_model.model.{module}.lora_B.weight"] = change.up.detach().bfloat16()
    file = folder / "adapter_model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable by its owner only
    names = sorted({module.rpartition(".")[2] for module in added})  # which the vision tower has too
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "target_modules": rf"{re.escape(_DECODER)}\..*\.({'|'.join(names)})",
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Train the demonstration adapter and write it in peft's layout."""
    standard = Recipe()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=standard.seed)
    parser.add_argument("--steps", type=int, default=standard.steps)
    parser.add_argument("--tokens-per-step", type=int, default=standard.tokens_per_step)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    values = {"seed": options.seed, "steps": options.steps, "tokens_per_step": options.tokens_per_step}
    train(replace(standard, **values), options.out)


if __name__ == "__main__":
    main()
