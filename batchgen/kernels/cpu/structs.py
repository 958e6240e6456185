"""Arguments of the compiled functions as ctypes structs, field by field as in `src/*.h`."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from typing import TypeVar

Kind = TypeVar("Kind")


def fields(kind: Kind, names: str) -> tuple[tuple[str, Kind], ...]:
    """Fields of one type; `names` is separated by blanks."""
    return tuple((name, kind) for name in names.split())


class Norm(Structure):
    """`Norm` of elementwise.h: RMS norm of x, or of x + delta."""

    _fields_ = (
        *fields(c_void_p, "x delta weight out"),
        *fields(c_int64, "tokens hidden dtype"),
        ("eps", c_double),
        ("wide", c_int64),
    )


class FillSampledIds(Structure):
    """`FillSampledIds` of elementwise.h: token ids that the previous step sampled."""

    _fields_ = (("ids", c_void_p), ("source", c_void_p), ("sampled", c_void_p), ("tokens", c_int64))


class Gated(Structure):
    """`Gated` of elementwise.h: activation(gate) * up."""

    _fields_ = (*fields(c_void_p, "gate_up out"), *fields(c_int64, "tokens inner activation dtype wide"))


class Heads(Structure):
    """`Heads` of elementwise.h: query and key norms, rotary embedding, and the store to the KV pool."""

    _fields_ = (
        *fields(c_void_p, "qkv q_norm k_norm cos sin positions keys values slots"),
        *fields(c_int64, "tokens heads kv_heads dim dtype"),
        ("eps", c_double),
    )


class PageCopies(Structure):
    """`PageCopies` of copies.h: the first positions of pages copied to other pages."""

    _fields_ = (*fields(c_void_p, "caches bytes copies"), *fields(c_int64, "num_caches num_copies page_size"))


class Logits(Structure):
    """`Logits` of sampling.h: rows of logits."""

    _fields_ = (("data", c_void_p), ("rows", c_int64), ("vocab", c_int64), ("stride", c_int64), ("dtype", c_int64))


class RowScan(Structure):
    """`RowScan` of sampling.h: argmax, maximum, normalizer and validity of each row."""

    _fields_ = (("logits", Logits), *fields(c_void_p, "ids largest normalizers bad"))


class Top(Structure):
    """`Top` of sampling.h: the k largest logits of each row."""

    _fields_ = (("logits", Logits), ("k", c_int64), ("ids", c_void_p), ("values", c_void_p))


class RowKeys(Structure):
    """`RowKeys` of sampling.h: noise keys of the rows."""

    _fields_ = (*fields(c_void_p, "seeds samples positions keys"), ("rows", c_int64))


class Sample(Structure):
    """`Sample` of sampling.h: one sampled token per row."""

    _fields_ = (
        ("logits", Logits),
        ("sample_rows", c_void_p),
        ("draws", c_int64),
        *fields(c_void_p, "temperature top_k top_p min_p keys tokens bad"),
    )
