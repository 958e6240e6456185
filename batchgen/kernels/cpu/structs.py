"""Arguments of the compiled functions as ctypes structs, field by field as in `src/*.h`."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p


class Norm(Structure):
    """`Norm` of elementwise.h: RMS norm of x, or of x + delta."""

    _fields_ = (
        ("x", c_void_p),
        ("delta", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("hidden", c_int64),
        ("dtype", c_int64),
        ("eps", c_double),
        ("wide", c_int64),
    )


class FillSampledIds(Structure):
    """`FillSampledIds` of elementwise.h: token ids that the previous step sampled."""

    _fields_ = (("ids", c_void_p), ("source", c_void_p), ("sampled", c_void_p), ("tokens", c_int64))


class Gated(Structure):
    """`Gated` of elementwise.h: activation(gate) * up."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("inner", c_int64),
        ("activation", c_int64),
        ("dtype", c_int64),
        ("wide", c_int64),
    )


class Heads(Structure):
    """`Heads` of elementwise.h: query and key norms, rotary embedding, and the store to the KV pool."""

    _fields_ = (
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dtype", c_int64),
        ("eps", c_double),
    )


class PageCopies(Structure):
    """`PageCopies` of copies.h: the first positions of pages copied to other pages."""

    _fields_ = (
        ("caches", c_void_p),
        ("bytes", c_void_p),
        ("copies", c_void_p),
        ("num_caches", c_int64),
        ("num_copies", c_int64),
        ("page_size", c_int64),
    )


class Logits(Structure):
    """`Logits` of sampling.h: rows of logits."""

    _fields_ = (("data", c_void_p), ("rows", c_int64), ("vocab", c_int64), ("stride", c_int64), ("dtype", c_int64))


class RowScan(Structure):
    """`RowScan` of sampling.h: argmax, maximum, normalizer and validity of each row."""

    _fields_ = (
        ("logits", Logits),
        ("ids", c_void_p),
        ("largest", c_void_p),
        ("normalizers", c_void_p),
        ("bad", c_void_p),
    )


class Top(Structure):
    """`Top` of sampling.h: the k largest logits of each row."""

    _fields_ = (("logits", Logits), ("k", c_int64), ("ids", c_void_p), ("values", c_void_p))


class RowKeys(Structure):
    """`RowKeys` of sampling.h: noise keys of the rows."""

    _fields_ = (
        ("seeds", c_void_p),
        ("samples", c_void_p),
        ("positions", c_void_p),
        ("keys", c_void_p),
        ("rows", c_int64),
    )


class Sample(Structure):
    """`Sample` of sampling.h: one sampled token per row."""

    _fields_ = (
        ("logits", Logits),
        ("sample_rows", c_void_p),
        ("draws", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("keys", c_void_p),
        ("tokens", c_void_p),
        ("bad", c_void_p),
    )
