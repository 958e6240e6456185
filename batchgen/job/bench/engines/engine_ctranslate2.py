"""CTranslate2 on a CPU: static batches sorted by length, without padding of the shared part of a batch's prompts.

The model is converted once by its own converter, which needs torch and transformers beside it. Its types are those that
it supports on the processor; bfloat16 is none of a CPU's, so that float32 is taken unless the asked one must be kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2
from peer_tools import apart, converted, static_batches, together

_LEAST_PROMPT = 64
"""Tokens that all prompts must begin with for a static prompt to be tried."""
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
                raise RuntimeError(f"{dtype} is not among its types on this processor: {', '.join(supported)}")
            dtype = "float32"
        self._folder, self._dtype, self._threads = folder, dtype, threads
        self._words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator: Any = None
        self.prepare({})

    def describe(self) -> dict[str, Any]:
        """What is in force, and settings to try: sizes of batches, without and with a state that prompts share."""
        kind = self._generator.compute_type
        return {"dtype": kind, "device": "cpu", "threads": self._threads, "settings": list(_SETTINGS)}

    def prepare(self, setting: dict[str, Any]) -> None:
        """A generator that has kept no prompt's state."""
        self._generator = None
        self._generator = ctranslate2.Generator(
            str(self._folder), device="cpu", compute_type=self._dtype, inter_threads=1, intra_threads=self._threads
        )

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed: a call takes rows of one length of output.

        Raises:
            ValueError: the setting asks for a shared prompt, and there is none.
        """
        alone = apart(rows)
        prompt = _begin([row["ids"] for row in alone]) if setting["static_prompt"] else []
        if setting["static_prompt"] and len(prompt) < _LEAST_PROMPT:
            raise ValueError("these prompts do not begin alike")
        outputs: list[list[int]] = [[] for _ in alone]
        computed = decoded = 0
        for drawn, members in static_batches(alone, setting["batch"]):
            new = max(alone[i]["max_new"] for i in members)
            own = [alone[i]["ids"][len(prompt) :] for i in members]
            for i, ids in zip(members, self._batch(own, prompt, new, drawn=drawn), strict=True):
                outputs[i] = ids[: alone[i]["max_new"]]
            computed += sum(map(len, own))
            decoded += (new - 1) * len(members)
        return together(rows, outputs), {"prompt_tokens_computed": computed + len(prompt), "decode_rows": decoded}

    def _batch(self, prompts: list[list[int]], static: list[int], new: int, *, drawn: bool) -> list[list[int]]:
        answers = self._generator.generate_batch(
            [[self._words[i] for i in ids] for ids in prompts],
            beam_size=1,
            sampling_topk=0 if drawn else 1,
            min_length=new,
            max_length=new,
            end_token=[],
            include_prompt_in_result=False,
            static_prompt=[self._words[i] for i in static] or None,
        )
        return [list(answer.sequences_ids[0]) for answer in answers]


def _begin(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, but for a token of their own."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    return first[: next((i for i in range(most) if first[i] != last[i]), most)]


def _convert(model: str, folder: Path) -> None:
    from ctranslate2.converters import TransformersConverter  # with torch: seconds, and needed once

    TransformersConverter(model).convert(str(folder), force=True)
    # Words that a model without a text tokenizer does not name are null there, which its own loader refuses.
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    for name, place in (("unk_token", 0), ("bos_token", 1), ("eos_token", 2)):
        if values.get(name) is None:
            values[name] = words[place]
    path.write_text(json.dumps(values), encoding="utf-8")


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    if request["device"] != "cpu":
        raise RuntimeError("it is measured on a CPU only")
    kind = f"ctranslate2 {ctranslate2.__version__}"
    folder = converted(request["cache"], request["model"], kind, lambda aside: _convert(request["model"], aside))
    return Engine(folder, request["dtype"], request["threads"], keep_dtype=request["keep_dtype"])
