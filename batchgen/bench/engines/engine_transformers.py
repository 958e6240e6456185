"""transformers: `generate` with static left-padded batches, and continuous batching with a paged cache.

`generate` is an eager loop with SDPA attention. Continuous batching shares prefixes of whole blocks; each pass has a
new manager, so that its prefix cache is empty. The manager is created, and its CUDA graphs are captured, before the
measured time.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting, fastest_dtype

_HANG_SECONDS = 120.0
"""Seconds without a finished request after which the engine is considered hung."""
_STEP_TOKENS = (256, 1024)
"""Tokens per step to try on a CPU."""
_CACHE_BYTES = 4 << 30
"""Largest KV cache on a CPU."""
BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 128, 256, 512)}

# No end-of-sequence token, so that lengths are fixed, and no sampling defaults of the checkpoint.
_GREEDY = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
_SAMPLED = transformers.GenerationConfig(pad_token_id=0, **_SAMPLING)


def Engine(request: dict[str, Any]) -> PeerEngine:
    """The engine of the request's name."""
    return (_Continuous if request["engine"] == "transformers-continuous" else _Static)(request)


class _Engine(PeerEngine):
    """The model of a load request, in the faster dtype."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        torch.set_num_threads(request["threads"])
        transformers.utils.logging.disable_progress_bar()
        self._folder = request["model"]
        config = transformers.AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        packed = hasattr(config, "text_config")
        kind = transformers.AutoModelForImageTextToText if packed else transformers.AutoModelForCausalLM
        dtype = getattr(torch, fastest_dtype(request))
        model = kind.from_pretrained(self._folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
        self._model = model.to(self.device).eval()
        self.dtype, self.threads = str(self._model.dtype).removeprefix("torch."), torch.get_num_threads()


class _Static(_Engine):
    """One model in memory. Settings are batch sizes, with rows sorted by output or by prompt length."""

    version = transformers.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self._processor: Any = None
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
        files = [base64.b64decode(row["image"]) for row in rows if row["image"]]
        if not files:
            return {}
        from PIL import Image  # runs without pictures do not need it

        if self._processor is None:
            self._processor = transformers.AutoProcessor.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        inputs = self._processor.image_processor([Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
        tensors: dict[str, torch.Tensor] = inputs.to(self.device, self._model.dtype)
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


class _Continuous(_Engine):
    """One model in memory. Settings are tokens per step on a CPU."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self._manager: Any = None
        if self.device != "cuda":
            self.settings = [{"batched_tokens": tokens} for tokens in _STEP_TOKENS]
        # Older versions have no continuous batching.
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        # Without a FlashAttention library it falls back to SDPA, which is much slower; the version shows it.
        flash = is_flash_attn_3_available() or is_flash_attn_2_available()
        self.version = f"{transformers.__version__}, {'flash' if flash else 'SDPA'}"

    def prepare(self, rows: list[Row], setting: Setting) -> None:
        """Create and start the manager of the next pass."""
        # All rows of a workload have the same number of samples.
        sampling = _SAMPLING if any(row["samples"] > 1 for row in rows) else {"do_sample": False}
        config = transformers.GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=1, **sampling)
        small = {}
        if self.device != "cuda":
            step_tokens = setting.get("batched_tokens", _STEP_TOKENS[0])
            small["continuous_batching_config"] = cpu_batching(self._model, rows, step_tokens)
        with torch.no_grad():
            self._manager = self._model.init_continuous_batching(generation_config=config, **small)
            if self.device == "cuda":
                self._manager.warmup()
            self._manager.start()

    def run(self, samples: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`. Every sample is a request; they are sorted so that prefixes are adjacent."""
        manager, self._manager = self._manager, None
        outputs: list[list[int]] = [[] for _ in samples]
        try:
            for i in sorted(range(len(samples)), key=lambda i: samples[i]["ids"]):
                manager.add_request(samples[i]["ids"], request_id=str(i), max_new_tokens=samples[i]["max_new"])
            left = len(samples)
            while left:
                result = manager.get_result(timeout=_HANG_SECONDS)
                if result is None:
                    raise RuntimeError(f"continuous batching ended with {left} requests unanswered")
                if result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(str(result.error))
                    outputs[int(result.request_id)] = result.generated_tokens
                    left -= 1
        finally:  # the process cannot exit while the manager's thread runs
            manager.stop(block=True, timeout=5)
            manager.destroy()
        return outputs, {}


def cpu_batching(model: Any, rows: list[Row], step_tokens: int) -> transformers.ContinuousBatchingConfig:
    """Configuration on a CPU, with blocks for all rows, up to `_CACHE_BYTES`. The default takes nearly all memory."""
    made = transformers.ContinuousBatchingConfig(max_batch_tokens=step_tokens)
    sizes = model.config.get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    bytes_of_token = 2 * sizes.num_hidden_layers * heads * width * model.dtype.itemsize
    wanted = sum(row["samples"] * (-(-(len(row["ids"]) + row["max_new"]) // made.page_size) + 1) for row in rows)
    made.num_blocks = max(2, min(wanted, _CACHE_BYTES // (bytes_of_token * made.page_size)))
    return made
