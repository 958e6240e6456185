"""Evaluation of a model: greedy exact-match accuracy per task on held-out examples.

`python -m configs.demo_model.evaluate --model FOLDER` prints one JSON line per task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from batchgen.demo import model_path
from batchgen.demo.tasks import TASKS, Example, draw, is_correct
from configs.demo_model.export import language_model

BATCH = 64
MAX_NEW_TOKENS = 96
EVALUATION_SEED = 7


def prompt_ids(tokenizer: Any, example: Example) -> list[int]:
    """Token ids of an example's prompt."""
    if example.chat:
        encoded = tokenizer.apply_chat_template(example.messages(), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    return list(tokenizer(example.content.raw)["input_ids"])


@torch.inference_mode()
def completions(model: Any, tokenizer: Any, examples: Sequence[Example]) -> list[str]:
    """Greedy completions in the order of the examples."""
    prompts = [prompt_ids(tokenizer, example) for example in examples]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        longest = max(len(prompts[index]) for index in chosen)
        padding = [longest - len(prompts[index]) for index in chosen]
        rows = [[model.config.pad_token_id] * pad + prompts[index] for pad, index in zip(padding, chosen, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        output = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        decoded = tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        for index, text in zip(chosen, decoded, strict=True):
            texts[index] = text
    return texts


def heldout(per_task: int, seed: int = EVALUATION_SEED) -> list[Example]:
    """`per_task` held-out examples of every task."""
    return [draw("heldout", seed, index, task) for task in TASKS for index in range(per_task)]


def accuracy(model: Any, tokenizer: Any, examples: Sequence[Example]) -> dict[str, float]:
    """Share of exact answers of each task."""
    texts = completions(model, tokenizer, examples)
    correct: dict[str, list[bool]] = {}
    for example, text in zip(examples, texts, strict=True):
        correct.setdefault(example.task, []).append(is_correct(example, text))
    return {task: sum(marks) / len(marks) for task, marks in correct.items()}


def main(arguments: list[str] | None = None) -> None:
    """Evaluate a model folder in float32 and write one JSON line per task to standard output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--per-task", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mistakes", type=int, default=0, help="also print this many wrong answers per task")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = language_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for task in TASKS:
        examples = [draw("heldout", EVALUATION_SEED, index, task) for index in range(options.per_task)]
        texts = completions(model, tokenizer, examples)
        pairs = list(zip(examples, texts, strict=True))
        wrong = [(example, text) for example, text in pairs if not is_correct(example, text)]
        line = {"task": task, "rows": len(pairs), "exact": 1 - len(wrong) / len(pairs)}
        sys.stdout.write(json.dumps(line) + "\n")
        for example, text in wrong[: options.mistakes]:
            asked = example.content.prompt if example.chat else example.content.raw
            mistake = {"asked": asked, "expected": example.content.answer, "output": text}
            sys.stdout.write(json.dumps(mistake, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
