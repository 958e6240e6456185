"""CTranslate2 on a CPU: static batches sorted by length, optionally with a cached state of the common prefix.

The model is converted once by CTranslate2's converter, which needs torch and transformers in the same environment.
CTranslate2 has no bfloat16 on CPUs; float32 is used instead, unless the dtype must be kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2
from peer_tools import cached_conversion, expand_samples, join_samples, static_batches

_MIN_STATIC_PROMPT = 64
"""Smallest number of common leading tokens of all prompts for which a static prompt is tried."""
_SETTINGS = (
    {"batch": 8, "static_prompt": 0},
    {"batch": 16, "static_prompt": 0},
    {"batch": 32, "static_prompt": 0},
    {"batch": 64, "static_prompt": 0},
    {"batch": 128, "static_prompt": 0},
    {"batch": 256, "static_prompt": 0},
    {"batch": 16, "static_prompt": 1},
    {"batch": 64, "static_prompt": 1},
    {"batch": 128, "static_prompt": 1},
    {"batch": 256, "static_prompt": 1},
)


class Engine:
    """One model in memory."""

    version = ctranslate2.__version__

    def __init__(self, folder: Path, dtype: str, threads: int, *, keep_dtype: bool = False) -> None:
        supported = sorted(ctranslate2.get_supported_compute_types("cpu"))
        if dtype not in supported:
            if keep_dtype:
                raise RuntimeError(f"{dtype} is not supported on this processor; supported: {', '.join(supported)}")
            dtype = "float32"
        self._folder, self._dtype, self._threads = folder, dtype, threads
        self._words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator: Any = None
        self.prepare({})

    def describe(self) -> dict[str, Any]:
        """Dtype, device, threads, and settings to try: batch sizes, without and with a static prompt."""
        kind = self._generator.compute_type
        return {"dtype": kind, "device": "cpu", "threads": self._threads, "settings": list(_SETTINGS)}

    def prepare(self, setting: dict[str, Any]) -> None:
        """Create a new generator, which has no cached prompt."""
        self._generator = None
        self._generator = ctranslate2.Generator(
            str(self._folder), device="cpu", compute_type=self._dtype, inter_threads=1, intra_threads=self._threads
        )

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Generate with fixed lengths: greedily, or at temperature 1 for rows of several samples.

        Every row of a batch runs to the longest output of the batch and is then cut.

        Raises:
            ValueError: the setting has a static prompt, and the prompts have no common prefix.
        """
        samples = expand_samples(rows)
        prompt = _common_prefix([row["ids"] for row in samples]) if setting["static_prompt"] else []
        if setting["static_prompt"] and len(prompt) < _MIN_STATIC_PROMPT:
            raise ValueError("the prompts have no common prefix for a static prompt")
        outputs: list[list[int]] = [[] for _ in samples]
        computed = decoded = 0
        for sampled, members in static_batches(samples, setting["batch"]):
            new = max(samples[i]["max_new"] for i in members)
            own = [samples[i]["ids"][len(prompt) :] for i in members]
            for i, ids in zip(members, self._batch(own, prompt, new, sampled=sampled), strict=True):
                outputs[i] = ids[: samples[i]["max_new"]]
            computed += sum(map(len, own))
            decoded += (new - 1) * len(members)
        return join_samples(rows, outputs), {"prompt_tokens_computed": computed + len(prompt), "decode_rows": decoded}

    def _batch(self, prompts: list[list[int]], static: list[int], new: int, *, sampled: bool) -> list[list[int]]:
        answers = self._generator.generate_batch(
            [[self._words[i] for i in ids] for ids in prompts],
            beam_size=1,
            sampling_topk=0 if sampled else 1,
            min_length=new,
            max_length=new,
            end_token=[],
            include_prompt_in_result=False,
            static_prompt=[self._words[i] for i in static] or None,
        )
        return [list(answer.sequences_ids[0]) for answer in answers]


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    """Common prefix of all prompts that leaves at least one token of each."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    return first[: next((i for i in range(most) if first[i] != last[i]), most)]


def _convert(model: str, folder: Path) -> None:
    from ctranslate2.converters import TransformersConverter  # imports torch, which is only needed here

    TransformersConverter(model).convert(str(folder), force=True)
    # The converter writes null for special tokens that the tokenizer lacks, which the loader rejects.
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    for name, place in (("unk_token", 0), ("bos_token", 1), ("eos_token", 2)):
        if values.get(name) is None:
            values[name] = words[place]
    path.write_text(json.dumps(values), encoding="utf-8")


def load(request: dict[str, Any]) -> Engine:
    """The engine of a load request."""
    if request["device"] != "cpu":
        raise RuntimeError("supported on CPUs only; give --device cpu")
    kind = f"ctranslate2 {ctranslate2.__version__}"
    model = request["model"]
    folder = cached_conversion(request["cache"], model, kind, lambda temporary: _convert(model, temporary))
    return Engine(folder, request["dtype"], request["threads"], keep_dtype=request["keep_dtype"])
