"""transformers' `generate`: eager loop, SDPA attention, static left-padded batches."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting, load_transformers

BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 128, 256, 512)}

# No end-of-sequence token, so that lengths are fixed, and no sampling defaults of the checkpoint.
_GREEDY = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
_SAMPLED = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)


class Engine(PeerEngine):
    """One model in memory. Settings are batch sizes, with rows sorted by output or by prompt length."""

    version = transformers.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self._model, self._folder = load_transformers(request), request["model"]
        self._processor: Any = None
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.threads = torch.get_num_threads()
        orders: tuple[dict[str, int], ...] = ({}, {"prompt_first": 1})
        self.settings = [{"batch": size, **order} for order in orders for size in BATCH_SIZES[self.device]]

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`. Batches have rows of similar length."""
        outputs: list[list[int]] = [[] for _ in samples]
        prompt_tokens = decode_rows = 0
        for sampled, members in static_batches(samples, setting["batch"], prompt_first="prompt_first" in setting):
            batch = [samples[i] for i in members]
            width, new = max(len(row["ids"]) for row in batch), max(row["max_new"] for row in batch)
            tokens = self._batch(batch, width, new, _SAMPLED if sampled else _GREEDY)
            for i, ids in zip(members, tokens, strict=True):
                outputs[i] = ids[: samples[i]["max_new"]]
            prompt_tokens += width * len(members)
            decode_rows += (new - 1) * len(members)
        return outputs, {"prompt_tokens_computed": prompt_tokens, "decode_rows": decode_rows}

    def _batch(self, rows: list[Row], width: int, new: int, config: transformers.GenerationConfig) -> list[list[int]]:
        prompts = [row["ids"] for row in rows]
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        self._model.generation_config = config
        with torch.inference_mode():
            out = self._model.generate(input_ids=ids, attention_mask=mask, **self._images(rows), max_new_tokens=new)
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens

    def _images(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """What the model's own processor makes of the pictures of the rows, if they have any."""
        files = [base64.b64decode(row["image"]) for row in rows if row.get("image")]
        if not files:
            return {}
        from PIL import Image  # runs without pictures do not need it

        if self._processor is None:
            self._processor = transformers.AutoProcessor.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        found = self._processor.image_processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
        tensors: dict[str, torch.Tensor] = found.to(self.device, self._model.dtype)
        return tensors


def static_batches(rows: Sequence[Row], size: int, *, prompt_first: bool = False) -> list[tuple[bool, list[int]]]:
    """Static batches of rows of similar lengths: (whether the rows are sampled, indices of rows).

    Greedy and sampled rows are in separate batches. Rows are sorted by output length, then prompt length, or the other
    way round with `prompt_first`; the longest come first.
    """
    batches = []
    for sampled in (False, True):
        kept = [i for i, row in enumerate(rows) if row["sampled"] == sampled]
        lengths = {i: (-rows[i]["max_new"], -len(rows[i]["ids"])) for i in kept}
        kept.sort(key=lambda i: lengths[i][::-1] if prompt_first else lengths[i])
        batches += [(sampled, kept[begin : begin + size]) for begin in range(0, len(kept), size)]
    return batches
