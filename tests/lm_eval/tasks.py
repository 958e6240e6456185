"""Tasks of the harness over local files: multiple choice, rolling likelihood, generation."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.e2e.model import SENTENCES

NAMES = ("choices", "rolling", "generated")
_WORDS = " ".join(SENTENCES).split()


def write_tasks(folder: Path, count: int = 12, longest: int = 90) -> Path:
    """Write the data and the YAML file of each task; texts of the rolling task have up to `longest` words."""
    rng = Random(5)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randint(low, high)))

    documents = [
        {
            "question": words(3, 12),
            "choices": [words(1, 4), words(1, 2), rng.choice("ABC"), words(2, 6)],
            "label": rng.randrange(4),
            "answer": words(1, 3),
            "page": words(1, longest),
        }
        for _ in range(count + 5)
    ]
    for split, part in (("train", documents[:5]), ("test", documents[5:])):
        lines = [json.dumps(each) + "\n" for each in part]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
    }
    tasks: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        "generated": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 24},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **task}), encoding="utf-8")
    return folder
