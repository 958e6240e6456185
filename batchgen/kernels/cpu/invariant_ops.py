"""The compiled `Ops` for runs in which a row's bits may not depend on the others.

Compiled operations give each row to one thread, which works on it alone, in one order; what is not compiled and sums
over rows of logits comes from the plain ones that take them one by one.
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
    keep_only,
    log_normalizers,
    mask_tokens,
    moe_experts,
    nan_rows,
    penalise,
    read_out,
    rms_norm,
    rope_tables,
    rotate_and_store,
    route,
    row_keys,
    sample,
    token_logprobs,
    top_logprobs,
)
from batchgen.kernels.invariant_ops import filtered_scores

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
