"""Ahead-of-time cases of kernels that read logits: vocabularies of real models, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.gpu import logprobs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCABS = (8192, 50_257, 151_936, 262_144)
"""Few blocks; not divisible by 16; a common size; the largest models."""


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        tokens = torch.empty(7, dtype=torch.int64, device="meta")
        for vocab in VOCABS:
            logits = torch.empty(7, vocab, dtype=dtype, device="meta")
            yield f"argmax_lse[{name},V={vocab}]", partial(logprobs.argmax_lse, logits)
        yield f"log_normalizers[{name}]", partial(logprobs.log_normalizers, logits)
        yield f"token_logprobs[{name}]", partial(logprobs.token_logprobs, logits, tokens)
        known = torch.empty(7, dtype=torch.float32, device="meta")
        yield f"token_logprobs[{name},known]", partial(logprobs.token_logprobs, logits, tokens, known)
        # Variants by k, except for the scan, are in cases_top.
        yield f"top_logprobs[{name},k=20]", partial(logprobs.top_logprobs, logits, 20)
        for k in (0, 20, 128, 1024):
            yield f"gather_logprobs[{name},k={k}]", partial(logprobs.gather_logprobs, logits, tokens, k)
        yield f"mask_tokens[{name}]", partial(logprobs.mask_tokens, logits, tokens, tokens)
