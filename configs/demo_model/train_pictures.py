"""Training of the demonstration model's vision: `python -m configs.demo_model.train_pictures --out FOLDER`.

The language model stays as it is. A small vision tower first learns to name what is in a picture, by heads that are
thrown away. Then tower and projector learn to give the token embeddings of a sentence that says it, and at last,
through the language model, features that make it answer questions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer

from batchgen.demo import model_path
from configs.demo_model.export import language_model
from configs.demo_model.pictures import COLOURS, MOST, SHAPES, Example, Kind, Split, examples
from configs.demo_model.tokenizer import BOS, END, ROLES
from configs.demo_model.vision import FEATURES, export_pictures, rescale, tower_states, vision_model

NAMING_STEPS: Final = 6000
CAPTION_STEPS: Final = 3000
ANSWERING_STEPS: Final = (600, 1400)
BATCH: Final = 64
POOL: Final = 24_000
"""Pictures that are drawn once and seen again and again while naming is learned."""
_IGNORED: Final = -100
_SPREAD: Final = 16.0
"""How many variances of an embedding's numbers a squared distance counts by."""


class NamingHeads(nn.Module):
    """Heads for colour, shape or digit, and count, from all features of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width * FEATURES, n) for n in (len(COLOURS), len(SHAPES) + 10, MOST))

    def loss(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and the share of pictures named right; states [B, P, W], targets [B, 3], -100 for no answer."""
        inputs = functional.layer_norm(states, states.shape[-1:]).flatten(1)
        losses, rights = [], []
        for head, wanted in zip(self.heads, targets.T, strict=True):
            logits = head(inputs)
            losses.append(functional.cross_entropy(logits, wanted, ignore_index=_IGNORED))
            rights.append((logits.argmax(-1) == wanted) | (wanted == _IGNORED))
        return torch.stack(losses).sum(), torch.stack(rights).all(0).float().mean()


def targets_of(kind: Kind) -> list[int]:
    """What the heads should say."""
    colour = list(COLOURS).index(kind.colour)
    if kind.digit is not None:
        return [colour, len(SHAPES) + kind.digit, _IGNORED]
    return [colour, SHAPES.index(str(kind.shape)), kind.count - 1]


class Pool:
    """Pictures to train on that are drawn once, and seen again and again at other places."""

    def __init__(self, split: Split, seed: int, count: int) -> None:
        chosen = list(itertools.islice(examples(split, seed), count))
        self.kinds = [example.kind for example in chosen]
        self.pixels = torch.from_numpy(
            np.stack([np.asarray(example.image) for example in chosen])
        )  # [N, S, S, 3] uint8
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Numbers [B] and pictures [B, S, S, 3] of a batch."""
        chosen = torch.randint(len(self.kinds), (BATCH,), generator=self._generator)
        shift = [int(x) for x in torch.randint(-3, 4, (2,), generator=self._generator)]
        return chosen, torch.roll(self.pixels[chosen], shift, (1, 2))


def train_naming(tower: Any, pool: Pool, held: Pool, steps: int) -> None:
    """Train the tower to name what is in pictures, by all features of a picture together."""
    heads, targets = NamingHeads(tower.config.hidden_size), torch.tensor([targets_of(kind) for kind in pool.kinds])
    run = _Run("naming", [*tower.parameters(), *heads.parameters()], 1e-3, steps)
    for _ in range(steps):
        chosen, images = pool.draw()
        run.step(*heads.loss(tower_states(tower, images), targets[chosen]))
    with torch.no_grad():
        _, right = heads.loss(tower_states(tower, held.pixels), torch.tensor([targets_of(kind) for kind in held.kinds]))
    _say(f"naming, held out: right {float(right):.3f}")


def train_captions(model: nn.ModuleDict, pool: Pool, held: Pool, prompts: Prompts, steps: int) -> None:
    """Train tower and projector to give the token embeddings of a caption: what the language model reads as text."""
    tokens = torch.tensor([prompts.caption(kind) for kind in pool.kinds])  # [N, P]
    run = _Run("captions", list(model.parameters()), 5e-4, steps)
    for _ in range(steps):
        chosen, images = pool.draw()
        run.step(*_caption_loss(model, images, tokens[chosen], prompts))
    with torch.no_grad():
        wanted = torch.tensor([prompts.caption(kind) for kind in held.kinds])
        _, right = _caption_loss(model, held.pixels, wanted, prompts)
    _say(f"captions, held out: right {float(right):.3f}")


def _caption_loss(model: nn.ModuleDict, images: Tensor, tokens: Tensor, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Distance to the tokens' embeddings, alone and against other tokens', and the share of captions that are right."""
    features = model["projector"](tower_states(model["tower"], images))  # [B, P, H]
    wanted, scale = prompts.embedded(tokens), prompts.embeddings.var()
    near = -torch.cdist(features.flatten(0, 1), prompts.embeddings).square() / (_SPREAD * scale)  # [B x P, V]
    right = (near.argmax(1).view_as(tokens) == tokens).all(1).float().mean()
    return functional.mse_loss(features, wanted) / scale + functional.cross_entropy(near, tokens.flatten()), right


class _Run:
    """The steps of a part of the training."""

    def __init__(self, name: str, parameters: Any, rate: float, steps: int, report: int = 100) -> None:
        self._name, self._report = name, report
        self._optimizer = torch.optim.AdamW(parameters, weight_decay=0.02)
        rates = [group.get("lr", rate) for group in parameters] if isinstance(parameters[0], dict) else rate
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, rates, total_steps=steps, pct_start=0.05)
        self._parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._began, self._rights = time.monotonic(), list[float]()

    def step(self, loss: Tensor, right: Tensor) -> None:
        """Change the parameters by the loss."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._rights.append(float(right))
        if len(self._rights) % self._report == 0:
            share = sum(self._rights[-self._report :]) / self._report
            seconds = time.monotonic() - self._began
            _say(f"{self._name} {len(self._rights)}: loss {loss.item():.3f}, right {share:.3f}, {seconds:.0f} s")


class Prompts:
    """Prompts and answers as embeddings, with the places of the features."""

    def __init__(self, language: Any, tokenizer: Any) -> None:
        self._embed = language.get_input_embeddings()
        self._tokenizer = tokenizer
        self._ids = {token: tokenizer.convert_tokens_to_ids(token) for token in [BOS, END, *ROLES.values()]}

    def batch(self, chosen: Sequence[Example], features: Tensor, rng: Random) -> tuple[Tensor, Tensor]:
        """Embeddings [B, T, H] and targets [B, T], -100 outside answers; features [B, P, H].

        The picture is before or after the question, with or without a new line between them.
        """
        rows, targets = [], []
        for example, own in zip(chosen, features, strict=True):
            between = rng.choice(["", "\n"])
            first = rng.random() < 0.5
            question = f"{between}{example.question}" if first else f"{example.question}{between}"
            asked = self._embedded(self._tokenizer(question, add_special_tokens=False)["input_ids"])
            answer = [*self._tokenizer(example.answer, add_special_tokens=False)["input_ids"], self._ids[END]]
            parts = [own, asked] if first else [asked, own]
            head = self._embedded([self._ids[BOS], self._ids[ROLES["user"]]])
            tail = self._embedded([self._ids[END], self._ids[ROLES["assistant"]], *answer])
            row = torch.cat([head, *parts, tail])
            rows.append(row)
            targets.append(torch.tensor([_IGNORED] * (len(row) - len(answer)) + answer))
        return nn.utils.rnn.pad_sequence(rows, True), nn.utils.rnn.pad_sequence(targets, True, _IGNORED)

    @property
    def embeddings(self) -> Tensor:
        """[V, H] of all tokens."""
        found: Tensor = self._embed.weight
        return found

    def embedded(self, ids: Tensor) -> Tensor:
        """[*] -> [*, H]."""
        found: Tensor = self._embed(ids)
        return found

    def caption(self, kind: Kind) -> list[int]:
        """A sentence of `FEATURES` tokens that says what is in a picture, as orders do in the tasks."""
        number, thing = (kind.count, kind.shape) if kind.digit is None else (kind.digit, "digit")
        text = f"We have {number} {kind.colour} {thing}."
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) <= FEATURES, text
        filler = self._tokenizer("\n", add_special_tokens=False)["input_ids"]
        return [*filler * (FEATURES - len(ids)), *ids]

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return self.embedded(torch.tensor(ids))


def train_answering(model: nn.ModuleDict, language: Any, prompts: Prompts, steps: int, seed: int) -> None:
    """Train tower and projector through the language model, which does not change."""
    stream, rng = examples("train", seed), Random(seed)
    groups = [
        {"params": list(model["tower"].parameters()), "lr": 2e-4},
        {"params": list(model["projector"].parameters()), "lr": 1e-3},
    ]
    run = _Run("answering", groups, 1e-3, steps, report=20)
    for _ in range(steps):
        chosen = list(itertools.islice(stream, BATCH // 2))
        run.step(*answers(model, language, prompts, chosen, rng))


def answers(
    model: nn.ModuleDict, language: Any, prompts: Prompts, chosen: Sequence[Example], rng: Random
) -> tuple[Tensor, Tensor]:
    """Loss of the answers, and the share whose tokens all are the likeliest."""
    images = torch.from_numpy(np.stack([np.asarray(example.image) for example in chosen]))
    features = model["projector"](tower_states(model["tower"], images))
    embedded, targets = prompts.batch(chosen, features, rng)
    logits, targets = language(inputs_embeds=embedded).logits[:, :-1], targets[:, 1:]
    right = ((logits.argmax(-1) == targets) | (targets == _IGNORED)).all(1).float().mean()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED), right


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Train, and write a model folder with the language model, the vision tower and the projector."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, default=model_path(), help="folder of the language model")
    parser.add_argument("--naming-steps", type=int, default=NAMING_STEPS)
    parser.add_argument("--caption-steps", type=int, default=CAPTION_STEPS)
    parser.add_argument("--answering-steps", type=int, nargs="+", default=ANSWERING_STEPS, help="of each schedule")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tower", type=Path, help="file in which the tower is kept after naming, and found again")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    language = language_model(options.base).requires_grad_(False)
    model = vision_model(language.config.hidden_size)
    prompts, pool, held = (
        Prompts(language, tokenizer),
        Pool("train", options.seed, POOL),
        Pool("heldout", options.seed, 512),
    )
    if options.tower is not None and options.tower.exists():
        model["tower"].load_state_dict(torch.load(options.tower, weights_only=True))
    else:
        train_naming(model["tower"], pool, held, options.naming_steps)
        rescale(model["tower"], pool.pixels[:BATCH])
        if options.tower is not None:
            torch.save(model["tower"].state_dict(), options.tower)
    train_captions(model, pool, held, prompts, options.caption_steps)
    for number, steps in enumerate(options.answering_steps):
        train_answering(model, language, prompts, steps, options.seed + 2 + number)
    export_pictures(model, options.base, options.out)


if __name__ == "__main__":
    main()
