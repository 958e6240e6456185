"""The compiled `Ops` for deterministic runs, in which a row's results do not depend on the other rows, bit for bit.

A compiled operation computes each row on one thread, in a fixed order. Operations that are not compiled and sum over
rows of logits come from `kernels.deterministic_ops`, which computes rows one by one.
"""

from __future__ import annotations

from batchgen.kernels.cpu.ops import (
    add_bias,
    add_lora,
    add_rms_norm,
    apply_bitmask,
    argmax_lse,
    count_tokens,
    drew_masked,
    gated,
    gather_logprobs,
    keep_only,
    log_normalizers,
    mask_tokens,
    moe_experts,
    nan_rows,
    penalise,
    qk_norm_rope_cache,
    rms_norm,
    rope_tables,
    route,
    row_keys,
    sample,
    token_logprobs,
    top_logprobs,
)
from batchgen.kernels.deterministic_ops import filtered_scores

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
