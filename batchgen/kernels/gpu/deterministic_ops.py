"""Batch-invariant `Ops` on Triton: a row's result depends only on that row, bit for bit.

Most launchers of `gpu.ops` are batch-invariant already: one program per row or per block of a row, with blocks that
depend on the model, not on the number of rows. LoRA and MoE choose tiles by the number of tokens; here their tiles are
fixed. `add_bias` adds atomically, so repeated pairs of a row and a token have no order.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from batchgen.kernels.chips import fixed_tuning
from batchgen.kernels.gpu import lora, moe
from batchgen.kernels.gpu.activation import gated
from batchgen.kernels.gpu.bitmask import apply_bitmask
from batchgen.kernels.gpu.counts import count_tokens, penalise
from batchgen.kernels.gpu.filtering import filtered_scores
from batchgen.kernels.gpu.heads import qk_norm_rope_cache
from batchgen.kernels.gpu.logprobs import (
    argmax_lse,
    gather_logprobs,
    log_normalizers,
    mask_tokens,
    token_logprobs,
    top_logprobs,
)
from batchgen.kernels.gpu.moe import route
from batchgen.kernels.gpu.noise import row_keys
from batchgen.kernels.gpu.norm import add_rms_norm, rms_norm
from batchgen.kernels.gpu.rope import rope_tables
from batchgen.kernels.gpu.sampling import nan_rows, sample
from batchgen.kernels.gpu.shaping import add_bias, drew_masked, keep_only
from batchgen.kernels.lora import LoraPairs, LoraStep
from batchgen.kernels.moe import Experts

__all__ = [
    "add_bias",
    "add_lora",
    "add_rms_norm",
    "apply_bitmask",
    "argmax_lse",
    "count_tokens",
    "drew_masked",
    "filtered_scores",
    "gated",
    "gather_logprobs",
    "keep_only",
    "log_normalizers",
    "mask_tokens",
    "moe_experts",
    "nan_rows",
    "penalise",
    "qk_norm_rope_cache",
    "rms_norm",
    "rope_tables",
    "route",
    "row_keys",
    "sample",
    "token_logprobs",
    "top_logprobs",
]

_EXPERT_ROWS: Final = 64
"""Tokens per tile of an expert."""


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """See `gpu.lora.add_lora`."""
    lora.add_lora(out, x, step, pairs, fixed=True)


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """See `gpu.moe.moe_experts`."""
    return moe.moe_experts(x, ids, weights, experts, fixed_tuning(x.device).grouped_tile(_EXPERT_ROWS, x.dtype))
