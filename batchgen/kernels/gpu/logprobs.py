"""Log-probabilities from logits of any float type in Triton, as `kernels.logprobs`, without a float32 [R, V] copy.

Each function reads [R, V] once (`row_scan`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels import logprobs as torch_logprobs
from batchgen.kernels.gpu.launch import launch
from batchgen.kernels.gpu.row_scan import scan_rows
from batchgen.kernels.gpu.top import group_size, select_top, serves
from batchgen.kernels.logprobs import GatheredLogprobs

_ROWS = 128


@triton.jit(do_not_specialize=["rows"])
def _token_kernel(p_logits, stride_r, stride_v, p_token, p_lse, p_out, rows, ROWS: tl.constexpr):
    """out[r] = x[r, token[r]] - lse[r]. Grid: (R / ROWS). 64-bit addresses; reads 4 values per row."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    i_v = tl.load(p_token + o_row, mask=m_row, other=0)
    x = tl.load(p_logits + o_row * stride_r + i_v * stride_v, mask=m_row, other=0.0).to(tl.float32)
    tl.store(p_out + o_row, x - tl.load(p_lse + o_row, mask=m_row, other=0.0), mask=m_row)


@triton.jit(do_not_specialize=["pairs"])
def _mask_kernel(p_logits, stride_r, stride_v, p_row, stride_row, p_id, stride_id, pairs, PAIRS: tl.constexpr):
    """x[row[i], id[i]] = -inf. Grid: (m / PAIRS). 64-bit addresses; writes one value per pair."""
    o_pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    m_pair = o_pair < pairs
    i_row = tl.load(p_row + o_pair * stride_row, mask=m_pair, other=0)
    i_v = tl.load(p_id + o_pair * stride_id, mask=m_pair, other=0)
    barred = tl.full([PAIRS], -float("inf"), tl.float32)
    tl.store(p_logits + i_row * stride_r + i_v * stride_v, barred, mask=m_pair)


def argmax_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.logprobs.argmax_lse`."""
    scan = scan_rows(logits, arg=True)
    assert scan.ids is not None
    assert scan.maxima is not None
    assert scan.normalizers is not None
    assert scan.bad is not None
    return scan.ids, scan.maxima, scan.normalizers, scan.bad


def log_normalizers(logits: Tensor) -> Tensor:
    """See `kernels.logprobs.log_normalizers`."""
    normalizers = scan_rows(logits).normalizers
    assert normalizers is not None
    return normalizers


def token_logprobs(logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
    """See `kernels.logprobs.token_logprobs`."""
    if normalizers is None:
        targets = scan_rows(logits, targets=tokens.contiguous()).targets
        assert targets is not None
        return targets
    rows = logits.shape[0]
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        _token_kernel, (triton.cdiv(rows, _ROWS),), logits, logits.stride(0), logits.stride(1),
        tokens.contiguous(), normalizers.contiguous(), out, rows, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out


def top_logprobs(logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.logprobs.top_logprobs`, which also finds the tokens if `top.serves` is False.

    Reads the logits once in total if `normalizers` is None.
    """
    if not serves(logits.shape[1], k):
        return torch_logprobs.top_logprobs(logits, k, log_normalizers(logits) if normalizers is None else normalizers)
    group = group_size(logits.shape[1], k)
    groups = None
    if group or normalizers is None:
        scan = scan_rows(logits, normalize=normalizers is None, group=group)
        groups = scan.groups
        normalizers = scan.normalizers if normalizers is None else normalizers
    assert normalizers is not None
    values, ids = select_top(logits, k, groups, normalizers)
    return ids, values


def gather_logprobs(logits: Tensor, targets: Tensor, k: int) -> GatheredLogprobs:
    """See `kernels.logprobs.gather_logprobs`; reads the logits once."""
    served = serves(logits.shape[1], k)
    group = group_size(logits.shape[1], k) if k and served else 0
    scan = scan_rows(logits, targets=targets.contiguous(), group=group)
    assert scan.normalizers is not None
    assert scan.targets is not None
    if not served:
        ids, values = torch_logprobs.top_logprobs(logits, k, scan.normalizers)
    elif k:
        values, ids = select_top(logits, k, scan.groups, scan.normalizers)
    else:
        values, ids = (torch.empty(len(logits), 0, dtype=d, device=logits.device) for d in (torch.float32, torch.int64))
    return GatheredLogprobs(scan.normalizers, scan.targets, ids, values)


def mask_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """See `kernels.logprobs.mask_tokens`."""
    pairs = rows.shape[0]
    launch(
        _mask_kernel, (triton.cdiv(pairs, _ROWS),), logits, logits.stride(0), logits.stride(1),
        rows, rows.stride(0), ids, ids.stride(0), pairs, PAIRS=_ROWS, num_warps=4,
    )  # fmt: skip
