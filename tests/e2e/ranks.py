"""A model split over processes: `python -m tests.e2e.ranks > configs/bench/results/ranks-MACHINE.jsonl`.

Prints a JSON line for each number of processes: the seconds of a job, and what was predicted from those of one process.
On a CPU the processes share the threads that one process has, so that the computations take as long, and the sums
between the processes are added: two for each layer, and one for the embedding, of the states of all tokens, as long as
measured between as many processes that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp

from batchgen.bench.machine import machine
from batchgen.bench.shapes import resolve_bench_model
from batchgen.engine.engine import Engine
from batchgen.engine.parallel.process_ranks import HOST, ProcessRanks, c10d

_SUMS = 200
"""Sums that are timed together."""


def _time_sums(rank: int, count: int, port: int, rows: int, width: int, results: Any) -> None:
    """Seconds of a sum of float32 states, as one of the processes."""
    torch.set_num_threads(1)
    ranks, states = ProcessRanks(rank, count), torch.ones(rows, width)
    ranks.connect(port, torch.device("cpu"))
    for _ in range(_SUMS // 10):
        ranks.sum(states)
    began = time.perf_counter()
    for _ in range(_SUMS):
        ranks.sum(states)
    if rank == 0:
        results.put((time.perf_counter() - began) / _SUMS)


def sum_seconds(count: int, rows: int, width: int) -> float:
    """Seconds of a sum of states [rows, width] in float32 between so many processes."""
    if count == 1:
        return 0.0
    store = c10d.TCPStore(HOST, 0, count, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_time_sums, (count, store.port, rows, width, results), count)
    return float(results.get())


def measure(model: str, counts: Sequence[int], repeats: int, rows: int, prompt: int, tokens: int) -> Iterator[Any]:
    """Lines of one job of `rows` distinct prompts of `prompt` tokens, which generate `tokens` each, in turn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 1000, (rows, prompt), generator=generator).tolist()
    work = [{"input_ids": each, "max_new_tokens": tokens, "ignore_eos": True} for each in ids]
    folder, expected, one = resolve_bench_model(model), None, 0.0
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": max(counts)}
    engines = {count: Engine(folder, tensor_parallel=count, **options) for count in counts}
    sums = {count: sum_seconds(count, rows, engines[1].model.spec.hidden_size) for count in counts}
    for repeat in range(repeats):
        for count, engine in engines.items():
            list(engine.generate(work[:8], progress=False))
            began = time.perf_counter()
            done = [list(each.output_ids or ()) for each in engine.generate(work, ordered=True, progress=False)]
            seconds = time.perf_counter() - began
            expected = expected or done
            one = seconds if count == 1 else one
            assert engine.last_run is not None
            spec, steps = engine.model.spec, engine.last_run.loop.state.steps
            # All steps together have so many times the states whose sum was measured.
            predicted = one + (prompt + tokens) * (2 * spec.num_layers + 1) * sums[count]
            yield {
                "workload": "ranks", "model": model, "device": "cpu", "processes": count, "repeat": repeat,
                "rows": rows, "prompt_tokens": prompt, "output_tokens": tokens, "steps": steps,
                "sum_seconds": sums[count], "seconds": seconds, "predicted_seconds": predicted,
                "tokens_per_second": rows * tokens / seconds, "weight_bytes": spec.parameters * spec.dtype.itemsize,
                "same_tokens": done == expected, **machine(),
            }  # fmt: skip


def main() -> None:
    """Measure, and print each line when it is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.ranks", description="Jobs of split models.")
    parser.add_argument("--model", default="random:135m")
    parser.add_argument("--processes", type=int, nargs="*", default=(1, 2))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    options = given.repeats, given.rows, given.prompt, given.tokens
    for line in measure(given.model, given.processes, *options):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
