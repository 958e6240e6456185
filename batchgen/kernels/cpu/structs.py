"""The arguments of the compiled functions, field by field as in `src/*.h`."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

__all__ = ["Embed", "Feed", "Gated", "Heads", "Logits", "Norm", "PageCopies", "RowKeys", "RowScan", "Sample", "Top"]


class Norm(Structure):
    """`elementwise.h`: the norm of rows, or of their sums with a delta."""

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


class Feed(Structure):
    """`elementwise.h`: ids that a step before has drawn."""

    _fields_ = (
        ("ids", c_void_p),
        ("source", c_void_p),
        ("drawn", c_void_p),
        ("tokens", c_int64),
    )


class Gated(Structure):
    """`elementwise.h`: an activation times the other half."""

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
    """`elementwise.h`: heads normalised, rotated and stored."""

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


class Embed(Structure):
    """`elementwise.h`: rows of a table by id."""

    _fields_ = (
        ("ids", c_void_p),
        ("table", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("bytes", c_int64),
    )


class PageCopies(Structure):
    """`copies.cpp`: the heads of pages to other pages."""

    _fields_ = (
        ("caches", c_void_p),
        ("bytes", c_void_p),
        ("copies", c_void_p),
        ("num_caches", c_int64),
        ("num_copies", c_int64),
        ("page_size", c_int64),
    )


class Logits(Structure):
    """`sampling.h`: rows of logits."""

    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("stride", c_int64),
        ("dtype", c_int64),
    )


class RowScan(Structure):
    """`sampling.h`: the largest of each row, and its normaliser."""

    _fields_ = (
        ("logits", Logits),
        ("ids", c_void_p),
        ("largest", c_void_p),
        ("normalizers", c_void_p),
        ("bad", c_void_p),
    )


class Top(Structure):
    """`sampling.h`: the k largest of each row."""

    _fields_ = (("logits", Logits), ("k", c_int64), ("ids", c_void_p), ("values", c_void_p))


class RowKeys(Structure):
    """`sampling.h`: keys of the rows' next draws."""

    _fields_ = (
        ("seeds", c_void_p),
        ("samples", c_void_p),
        ("positions", c_void_p),
        ("keys", c_void_p),
        ("rows", c_int64),
    )


class Sample(Structure):
    """`sampling.h`: one token per row."""

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
