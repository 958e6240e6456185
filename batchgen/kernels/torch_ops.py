"""`Ops` in plain PyTorch: the reference implementation."""

from __future__ import annotations

from batchgen.kernels.activation import gated
from batchgen.kernels.bitmask import apply_bitmask
from batchgen.kernels.counts import count_tokens, penalise
from batchgen.kernels.filtering import filtered_scores
from batchgen.kernels.heads import qk_norm_rope_cache
from batchgen.kernels.logprobs import (
    argmax_lse,
    gather_logprobs,
    log_normalizers,
    mask_tokens,
    token_logprobs,
    top_logprobs,
)
from batchgen.kernels.lora import add_lora
from batchgen.kernels.moe import moe_experts, route
from batchgen.kernels.noise import row_keys
from batchgen.kernels.norm import add_rms_norm, rms_norm
from batchgen.kernels.rope import rope_tables
from batchgen.kernels.sampling import nan_rows, sample
from batchgen.kernels.shaping import add_bias, drew_masked, keep_only

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
