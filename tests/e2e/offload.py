"""A model larger than its device: `python -m tests.e2e.offload > configs/bench/results/offload-MACHINE.jsonl`.

Prints a JSON line for each size of the device, given as a share of the bytes of the weights, after one for the whole
model: the seconds of the job's steps, and their floor, the bytes that were copied over the measured rate of copies.
With `--offload kv` a share is that of the bytes of keys and values that stay on the device. On
a CPU, which takes the place of a device, copies and computations share processor and memory: their times add up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from batchgen.bench.machine import machine
from batchgen.bench.shapes import resolve_bench_model
from batchgen.engine.engine import Engine
from batchgen.kernels.device import device_for
from batchgen.kernels.stream import copy_rate

SHARES: Final = (0.8, 0.6, 0.4)


def measure(
    model: str, device: str, shares: Sequence[float], rows: int, prompt: int, tokens: int, offload: str = "weights"
) -> Iterator[Any]:
    """Lines of one job of `rows` distinct prompts of `prompt` tokens, which generate `tokens` each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 1000, (rows, prompt), generator=generator).tolist()
    work = [{"input_ids": each, "max_new_tokens": tokens, "ignore_eos": True} for each in ids]
    folder, where = resolve_bench_model(model), torch.device(device)
    weights, cache, expected, rate = 0, 0, None, copy_rate(device_for(where))
    for share in (None, *shares):
        options: dict[str, Any] = {} if share is None else {"offload": offload, "device_memory": int(weights * share)}
        if share is not None and offload == "kv":
            options |= {"device_memory": 2 * weights + 2 * cache, "kv_memory": int(cache * share)}
        engine = Engine(folder, device=device, attention="torch" if device == "cpu" else "auto", **options)
        spec = engine.model.spec
        weights = spec.parameters * spec.dtype.itemsize
        began = time.perf_counter()
        done = [list(each.output_ids or ()) for each in engine.generate(work, ordered=True, progress=False)]
        seconds = time.perf_counter() - began
        expected = expected or done
        assert engine.last_run is not None
        stats, counts = engine.last_run.scheduler.stats, engine.last_run.loop.counts()
        cache = cache or engine.last_run.pool.nbytes
        names = ("weight_bytes", "kv_bytes_in", "kv_bytes_out")
        planned = ("planned_bytes", "kv_planned_bytes_in", "kv_planned_bytes_out")
        copied, plan = sum(counts.get(f"offload_{name}", 0) for name in names), spec.stream
        yield {
            "workload": "offload", "offload": offload, "model": model, "device": device, "share": share,
            "cache_bytes": cache, "weight_bytes": weights,
            "device_weight_bytes": weights if plan is None else plan.device_bytes,
            "streamed_blocks": 0 if plan is None else len(plan.streamed), "blocks": len(spec.block_bytes),
            "rows": rows, "prompt_tokens": prompt, "output_tokens": tokens, "rows_at_once": stats.max_decode_rows,
            "passes": counts.get("offload_passes", 0), "copied_bytes": copied,
            "planned_bytes": sum(counts.get(f"offload_{name}", 0) for name in planned), "copy_bytes_per_second": rate,
            "floor_seconds": copied / rate, "seconds": seconds, "same_tokens": done == expected, **machine(),
        }  # fmt: skip
        del engine


def main() -> None:
    """Measure, and print each line when it is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.offload", description="Jobs of streamed models.")
    parser.add_argument("--model", default="random:135m")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--offload", default="weights", choices=("weights", "kv", "auto"))
    given = parser.parse_args()
    job = (given.model, given.device, given.shares, given.rows, given.prompt, given.tokens, given.offload)
    for line in measure(*job):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
