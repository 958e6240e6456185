"""`Ops` on Triton, and its batch-invariant variant. Importing this module imports Triton."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from batchgen.kernels.chips import fixed_tuning
from batchgen.kernels.gpu import (
    activation,
    conv,
    counts,
    filtering,
    heads,
    linear_attention,
    logprobs,
    lora,
    matmul,
    moe,
    noise,
    norm,
    rope,
    sampling,
    selective_scan,
    shaping,
)
from batchgen.kernels.moe import Experts
from batchgen.kernels.ops import TORCH_OPS

TRITON_OPS: Final = replace(
    TORCH_OPS,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    gated=activation.gated,
    rope_tables=rope.rope_tables,
    qk_norm_rope_cache=heads.qk_norm_rope_cache,
    add_lora=lora.add_lora,
    route=moe.route,
    moe_experts=moe.moe_experts,
    causal_conv=conv.causal_conv,
    linear_attention=linear_attention.linear_attention,
    selective_scan=selective_scan.selective_scan,
    count_tokens=counts.count_tokens,
    penalise=counts.penalise,
    add_bias=shaping.add_bias,
    keep_only=shaping.keep_only,
    drew_masked=shaping.drew_masked,
    mask_tokens=logprobs.mask_tokens,
    log_normalizers=logprobs.log_normalizers,
    argmax_lse=logprobs.argmax_lse,
    token_logprobs=logprobs.token_logprobs,
    top_logprobs=logprobs.top_logprobs,
    gather_logprobs=logprobs.gather_logprobs,
    apply_bitmask=shaping.apply_bitmask,
    row_keys=noise.row_keys,
    nan_rows=sampling.nan_rows,
    sample=sampling.sample,
    filtered_scores=filtering.filtered_scores,
)
"""Triton launchers."""

_EXPERT_ROWS: Final = 64
"""Tokens per tile of an expert in batch-invariant runs."""


def _fixed_moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    return moe.moe_experts(x, ids, weights, experts, fixed_tuning(x.device).grouped_tile(_EXPERT_ROWS, x.dtype))


TRITON_INVARIANT_OPS: Final = replace(
    TRITON_OPS, linear=matmul.linear, add_lora=partial(lora.add_lora, fixed=True), moe_experts=_fixed_moe_experts
)
"""Triton launchers for which a row's result depends only on that row, bit for bit.

Most launchers are so anyway: one program per row or per block of a row, with blocks that depend on the model, not on
the number of rows. LoRA and MoE choose tiles by the number of tokens; here their tiles are fixed. `add_bias` adds
atomically, so repeated pairs of a row and a token have no order.
"""
