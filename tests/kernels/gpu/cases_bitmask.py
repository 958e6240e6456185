"""Ahead-of-time cases of packed masks: vocabularies of few and of many words, and odd ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from batchgen.kernels.bitmask import bitmask_width
from batchgen.kernels.gpu import bitmask


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for vocab in (512, 50_257, 151_936):
            logits = torch.empty(7, vocab, dtype=dtype, device="meta")
            masks = torch.empty(3, bitmask_width(vocab), dtype=torch.int32, device="meta")
            rows = torch.empty(3, dtype=torch.int64, device="meta")
            yield f"apply_bitmask[{name},V={vocab}]", partial(bitmask.apply_bitmask, logits, masks)
            yield f"apply_bitmask[{name},V={vocab},rows]", partial(bitmask.apply_bitmask, logits, masks, rows)
