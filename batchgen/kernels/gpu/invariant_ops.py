"""`Ops` on Triton whose result for a row depends on that row alone, bit for bit.

Most launchers of `gpu.ops` are such already: a program per row or per block of a row, blocks cut by what a model fixes,
never by the number of rows. Adapters and experts choose tiles by how many tokens come together; here they may not.
`add_bias` adds atomically: pairs of one row and one token that stand several times have no order.
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
from batchgen.kernels.gpu.heads import rotate_and_store
from batchgen.kernels.gpu.logprobs import (
    argmax_lse,
    log_normalizers,
    mask_tokens,
    read_out,
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
    "keep_only",
    "log_normalizers",
    "mask_tokens",
    "moe_experts",
    "nan_rows",
    "penalise",
    "read_out",
    "rms_norm",
    "rope_tables",
    "rotate_and_store",
    "route",
    "row_keys",
    "sample",
    "token_logprobs",
    "top_logprobs",
]

_EXPERT_ROWS: Final = 64
"""Tokens of an expert's tile."""


def add_lora(out: Tensor, x: Tensor, step: LoraStep, pairs: LoraPairs) -> None:
    """See `gpu.lora.add_lora`."""
    lora.add_lora(out, x, step, pairs, fixed=True)


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """See `gpu.moe.moe_experts`."""
    return moe.moe_experts(x, ids, weights, experts, fixed_tuning(x.device).grouped_tile(_EXPERT_ROWS, x.dtype))
