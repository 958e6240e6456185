"""Fakes of vllm-flash-attn's compiled library: the same operations, registered with torch, in plain PyTorch.

A fake is a file whose text says which operations "loading" it registers and what they get wrong:
`torch.ops.load_library` is replaced by a function that reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FORWARD_3 = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin{more}) -> Tensor[]"
)
MORE_3 = ", Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
SCHEDULE_3 = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
FORWARD_2 = (
    "varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, "
    "int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool return_softmax{more}) -> Tensor[]"
)
MORE_2 = ", int num_splits, Tensor? gen"
OLD_2 = ", Generator? gen"


@dataclass
class Fakes:
    """Loaded files, and how often their operations were called."""

    loaded: list[Path] = field(default_factory=list)
    libraries: list[torch.library.Library] = field(default_factory=list)
    forwards: list[dict[str, Any]] = field(default_factory=list)
    schedules: int = 0

    def write(self, path: Path, version: int, **options: Any) -> Path:
        """Write a fake. Options: `old` for an older list of arguments, `fault` for what is wrong, `wants`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": version, **options}))
        return path

    def load(self, path: str | Path) -> None:
        """Replacement of `torch.ops.load_library`."""
        self.loaded.append(Path(path))
        try:
            options = json.loads(Path(path).read_text())
        except ValueError:
            raise OSError("Could not load this library") from OSError(f"{path}: invalid ELF header")
        if options["version"] == 0:
            return  # registers nothing
        old, fault, wants = options.get("old", False), options.get("fault", ""), options.get("wants", "")
        library = torch.library.Library(f"_vllm_fa{options['version']}_C", "DEF")
        self.libraries.append(library)
        if options["version"] == 3:
            self._register(library, FORWARD_3.format(more=wants or ("" if old else MORE_3)), fault)
            library.define(SCHEDULE_3)
            library.impl("get_scheduler_metadata", self._schedule(fault), "CPU")
        else:
            self._register(library, FORWARD_2.format(more=wants or (OLD_2 if old else MORE_2)), fault)

    def _register(self, library: torch.library.Library, schema: str, fault: str) -> None:
        library.define(schema)
        name, _, rest = schema.partition("(")
        names = [part.split()[1] for part in rest.partition(")")[0].split(", ")]

        def forward(*values: Any) -> list[Tensor]:
            given = dict(zip(names, values, strict=True))
            self.forwards.append(given)
            if fault == "used up" and (schedule := given.get("scheduler_metadata")) is not None:
                schedule += 1
                given["q"] = given["q"] * int(schedule[0])
            return _forward(given, fault)

        library.impl(name, forward, "CPU")

    def _schedule(self, fault: str) -> Any:
        def schedule(*values: Any) -> Tensor:
            self.schedules += 1
            if fault == "schedule":
                raise RuntimeError("no metadata today")
            return torch.zeros(values[0], dtype=torch.int32)

        return schedule


@contextmanager
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Fakes whose registrations end with the test."""
    made = Fakes()
    monkeypatch.setattr(torch.ops, "load_library", made.load)
    try:
        yield made
    finally:
        for library in made.libraries:
            library._destroy()


def _forward(given: dict[str, Any], fault: str) -> list[Tensor]:
    """Attention of every run in float32, with the checks of the real operations."""
    q, k, v, table = given["q"], given["k"], given["v"], given.get("page_table", given.get("block_table"))
    lens, starts, queries = given["seqused_k"], given["cu_seqlens_q"], given["max_seqlen_q"]
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert q.dtype == k.dtype == v.dtype
    for tensor in (table, lens, starts):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert given["is_causal"]
    assert int(lens.max()) == given["max_seqlen_k"]
    assert int(starts.diff().max()) == queries
    assert int(starts[-1]) == len(q)
    assert k.shape[1] % 16 == 0 or "page_table" in given
    heads, left = q.shape[1], given["window_size_left"]
    out = given["out"] if given["out"] is not None else torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype)
    lse = torch.empty(heads, len(q))
    for run, length in enumerate(lens.tolist()):
        a, b = int(starts[run]), int(starts[run + 1])
        own = table[run, : -(-length // k.shape[1])].long()
        keys, values = (x[own].flatten(0, 1)[:length].float().repeat_interleave(heads // x.shape[2], 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q[a:b].float(), keys) * given["softmax_scale"]
        if given["softcap"] > 0:
            scores = given["softcap"] * torch.tanh(scores / given["softcap"])
        behind = torch.arange(length - (b - a), length)[:, None] - torch.arange(length)
        hidden = (behind < 0) | ((behind > left) if left >= 0 and fault != "window" else False)
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, a:b] = torch.logsumexp(scores, -1)
        out[a:b] = torch.einsum("nqk,knd->qnd", torch.softmax(scores, -1), values).to(out.dtype)
    return [*_spoilt(out, lse, queries, int(lens.max()), fault), torch.empty(0), torch.empty(0)]


def _spoilt(out: Tensor, lse: Tensor, queries: int, longest: int, fault: str) -> tuple[Tensor, Tensor]:
    if fault == "base 2":
        return out, lse / math.log(2)
    if fault == "transposed":
        return out, lse.t().contiguous()
    if fault == "nan" and queries == 1:
        return out * math.nan, lse
    if fault == "split" and queries == 1 and longest > 512:
        return out, lse.t().reshape(lse.shape)  # what versions before the corrected split returned
    if fault == "raises":
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors")
    return out, lse
