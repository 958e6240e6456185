"""The compiled `Ops` for CPUs, and its batch-invariant variant.

Operations on contiguous float32 and bfloat16 tensors on the CPU are compiled. Other layouts, and operations that are
not worth compiling, use the PyTorch versions. Logits are read in their own dtype, without a widened copy.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from batchgen.kernels import activation, heads, logprobs, noise, norm, sampling
from batchgen.kernels.cpu.command_buffer import COPY, SAMPLE, current_buffer
from batchgen.kernels.cpu.library import DTYPES, address, library
from batchgen.kernels.cpu.lora import add_lora
from batchgen.kernels.cpu.packed_pages import PackedPool
from batchgen.kernels.cpu.recurrent import causal_conv, linear_attention, selective_scan
from batchgen.kernels.cpu.structs import Gated, Heads, Logits, Norm, PageCopies, RowKeys, RowScan, Sample, Top
from batchgen.kernels.heads import HeadNorms
from batchgen.kernels.invariant import INVARIANT_OPS
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.ops import TORCH_OPS
from batchgen.kernels.sampling import SampleResult, SamplingColumns
from batchgen.kernels.types import KVPool

_SERIAL: Final = 1 << 14
"""Operations on fewer elements than this run on one thread, as waking others takes as long."""


def _threads(numbers: int) -> int:
    return 1 if numbers < _SERIAL else torch.get_num_threads()


def _takes(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled kernels take these tensors: contiguous, on the CPU, of one supported dtype, not empty."""
    dtype = first.dtype
    if dtype not in DTYPES or first.device.type != "cpu" or not first.is_contiguous() or not first.numel():
        return False
    return all(t is None or (t.dtype == dtype and t.is_contiguous()) for t in others)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`."""
    return _norm(x, None, weight, eps) if _takes(x, weight) else norm.rms_norm(x, weight, eps)


def _add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.add_rms_norm`."""
    if not _takes(x, delta, weight):
        return norm.add_rms_norm(x, delta, weight, eps)
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    width, numbers = x.shape[-1], x.numel()
    call = Norm(
        x.data_ptr(), address(delta), weight.data_ptr(), out.data_ptr(), numbers // width, width, DTYPES[x.dtype], eps
    )
    library().bg_norm(byref(call), _threads(numbers))
    return out


def _gated(gate_up: Tensor, name: str) -> Tensor:
    """See `activation.gated`."""
    kind = activation.KINDS[name]
    if not _takes(gate_up):
        return activation.gated(gate_up, name)
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    call = Gated(gate_up.data_ptr(), out.data_ptr(), tokens, inner, kind, DTYPES[gate_up.dtype])
    library().bg_gated(byref(call), _threads(out.numel()))
    return out


def _qk_norm_rope_cache(
    qkv: Tensor, norms: HeadNorms | None, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """See `heads.qk_norm_rope_cache`. Queries are rotated in place: the result is a view of `qkv`."""
    weights = (None, None) if norms is None else (norms.query, norms.key)
    if not _takes(qkv, *weights, *tables, keys, values) or not slots.is_contiguous():
        return heads.qk_norm_rope_cache(qkv, norms, tables, keys, values, slots)
    kv_heads = keys.shape[2]
    query_heads = qkv.shape[1] - 2 * kv_heads
    call = Heads(
        *map(address, (qkv, *weights, *tables, None, keys, values, slots)),
        qkv.shape[0],
        query_heads,
        kv_heads,
        qkv.shape[2],
        DTYPES[qkv.dtype],
        0.0 if norms is None else norms.eps,
    )
    library().bg_heads(byref(call), _threads(qkv.numel()))
    return qkv[:, :query_heads]


def _rows(logits: Tensor) -> Logits | None:
    """Logits [R, V] as a C argument; None if the compiled kernels do not take them."""
    if logits.dtype not in DTYPES or logits.device.type != "cpu" or not logits.numel() or logits.stride(1) != 1:
        return None
    rows, vocab = logits.shape
    return Logits(logits.data_ptr(), rows, vocab, logits.stride(0), DTYPES[logits.dtype])


def _log_normalizers(logits: Tensor) -> Tensor:
    """See `logprobs.log_normalizers`."""
    rows = _rows(logits)
    if rows is None:
        return logprobs.log_normalizers(logits)
    out = torch.empty(rows.rows, dtype=torch.float32)
    library().bg_row_scan(byref(RowScan(rows, None, None, out.data_ptr(), None)), _threads(logits.numel()))
    return out


def _argmax_lse(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `logprobs.argmax_lse`."""
    rows = _rows(logits)
    if rows is None:
        return logprobs.argmax_lse(logits)
    ids = torch.empty(rows.rows, dtype=torch.int64)
    largest, normalizers = torch.empty(2, rows.rows, dtype=torch.float32).unbind()
    bad = torch.empty(rows.rows, dtype=torch.bool)
    results = (ids, largest, normalizers, bad)
    library().bg_row_scan(byref(RowScan(rows, *(t.data_ptr() for t in results))), _threads(logits.numel()))
    return results


def _nan_rows(logits: Tensor) -> Tensor:
    """See `sampling.nan_rows`."""
    rows = _rows(logits)
    if rows is None:
        return sampling.nan_rows(logits)
    bad = torch.empty(rows.rows, dtype=torch.bool)
    library().bg_row_scan(byref(RowScan(rows, None, None, None, bad.data_ptr())), _threads(logits.numel()))
    return bad


def _token_logprobs(logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
    """See `logprobs.token_logprobs`."""
    return logprobs.token_logprobs(logits, tokens, _log_normalizers(logits) if normalizers is None else normalizers)


def _top_logprobs(logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `logprobs.top_logprobs`."""
    if normalizers is None:
        normalizers = _log_normalizers(logits)
    rows = _rows(logits)
    if rows is None:
        return logprobs.top_logprobs(logits, k, normalizers)
    ids = torch.empty(rows.rows, k, dtype=torch.int64)
    values = torch.empty(rows.rows, k, dtype=torch.float32)
    library().bg_top(byref(Top(rows, k, ids.data_ptr(), values.data_ptr())), _threads(logits.numel()))
    return ids, values.sub_(normalizers[:, None])


def _gather_logprobs(logits: Tensor, targets: Tensor, k: int) -> GatheredLogprobs:
    """See `logprobs.gather_logprobs`."""
    normalizers = _log_normalizers(logits)
    if k:
        ids, top = _top_logprobs(logits, k, normalizers)
    else:
        ids, top = targets.new_empty(len(logits), 0), normalizers.new_empty(len(logits), 0)
    return GatheredLogprobs(normalizers, _token_logprobs(logits, targets, normalizers), ids, top)


def _row_keys(seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
    """See `noise.row_keys`."""
    indexes = (seeds, sample_indexes, positions)
    if not all(t.dtype == torch.int64 and t.device.type == "cpu" and t.is_contiguous() for t in indexes):
        return noise.row_keys(seeds, sample_indexes, positions)
    keys = torch.empty_like(seeds)
    library().bg_row_keys(byref(RowKeys(*(t.data_ptr() for t in (*indexes, keys)), keys.numel())))
    return keys


def _sample(logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult:
    """See `sampling.sample`. Can be recorded in a command buffer."""
    rows = _rows(logits)
    if rows is None:
        return sampling.sample(logits, columns, sample_rows)
    draws = rows.rows if sample_rows is None else len(sample_rows)
    tokens = torch.empty(draws, dtype=torch.int64)
    bad = torch.empty(draws, dtype=torch.bool)
    assert columns.all_greedy or columns.keys is not None, "sampling needs keys"
    call = Sample(
        rows,
        address(sample_rows),
        draws,
        *map(address, (columns.temperature, columns.top_k, columns.top_p, columns.min_p)),
        *map(address, (None if columns.all_greedy else columns.keys, tokens, bad)),
    )
    buffer = current_buffer()
    if buffer is None:
        library().bg_sample(byref(call), _threads(draws * rows.vocab))
    else:
        buffer.add(SAMPLE, call, None, logits, sample_rows, columns, tokens, bad)
    return SampleResult(tokens, bad)


_SERIAL_COPIES: Final = 1 << 18
"""Fewer bytes than this are copied by one thread, as waking others takes as long."""


def _copy_pages(pool: KVPool, copies: Tensor) -> None:
    """See `kernels.pooled.copy_pages`: one compiled call for all layers. Can be recorded in a command buffer.

    The pool is on the CPU, of any dtype, and `copies` is contiguous. Reads and writes only the positions to copy,
    `positions * K * D * itemsize` bytes per cache and copy.
    """
    if isinstance(pool, PackedPool):
        pool.packed.write(copies[:, 1].numpy())
    caches = pool.caches
    assert copies.is_contiguous()
    assert all(cache.is_contiguous() for cache in caches)
    sizes = [cache.stride(1) * cache.element_size() for cache in caches]
    addresses = (c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
    bytes_of = (c_int64 * len(caches))(*sizes)
    call = PageCopies(
        addressof(addresses), addressof(bytes_of), copies.data_ptr(), len(caches), len(copies), pool.page_size
    )
    moved = sum(sizes) * pool.page_size * len(copies)
    buffer = current_buffer()
    if buffer is None:
        library().bg_page_copies(byref(call), 1 if moved < _SERIAL_COPIES else torch.get_num_threads())
    else:
        buffer.add(COPY, call, None, addresses, bytes_of, caches, copies)


COMPILED_OPS: Final = replace(
    TORCH_OPS,
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    gated=_gated,
    qk_norm_rope_cache=_qk_norm_rope_cache,
    add_lora=add_lora,
    log_normalizers=_log_normalizers,
    argmax_lse=_argmax_lse,
    nan_rows=_nan_rows,
    token_logprobs=_token_logprobs,
    top_logprobs=_top_logprobs,
    gather_logprobs=_gather_logprobs,
    row_keys=_row_keys,
    sample=_sample,
    copy_pages=_copy_pages,
    causal_conv=causal_conv,
    linear_attention=linear_attention,
    selective_scan=selective_scan,
)
"""Compiled operations; those that are not worth compiling are PyTorch's."""

COMPILED_INVARIANT_OPS: Final = replace(COMPILED_OPS, filtered_scores=INVARIANT_OPS.filtered_scores)
"""Compiled operations for which a row's result depends only on that row, bit for bit.

A compiled operation computes each row on one thread, in a fixed order. Of those that are not compiled, only
`filtered_scores` sums over rows of logits.
"""

TILED_OPS: Final = replace(
    INVARIANT_OPS, causal_conv=causal_conv, linear_attention=linear_attention, selective_scan=selective_scan
)
"""PyTorch's batch-invariant operations for models that run in tiles, and the compiled ones of recurrent layers."""
