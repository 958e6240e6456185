"""`Ops` on Triton: the launchers, and the PyTorch implementation of operations that need no kernel."""

from __future__ import annotations

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
from batchgen.kernels.gpu.lora import add_lora
from batchgen.kernels.gpu.moe import moe_experts, route
from batchgen.kernels.gpu.noise import row_keys
from batchgen.kernels.gpu.norm import add_rms_norm, rms_norm
from batchgen.kernels.gpu.rope import rope_tables
from batchgen.kernels.gpu.sampling import nan_rows, sample
from batchgen.kernels.gpu.shaping import add_bias, drew_masked, keep_only

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
