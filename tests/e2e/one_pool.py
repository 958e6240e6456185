"""Runs a prompt of 32k tokens and 2,500 short rows in one small pool: `python -m tests.e2e.one_pool MODEL`.

Prints counts, sizes and errors as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from batchgen import Engine
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable

LONG, SHORT, NEW = 32_000, 2_500, 3
POOL = 9 << 18
"""Bytes of the KV pool: the long prompt's pages and three hundred more."""
VOCAB = 512


def main() -> dict[str, Any]:
    engine = Engine(sys.argv[1], dtype="float32", kv_memory=POOL, max_num_seqs=256, max_tokens_per_step=2048)
    rng = np.random.default_rng(0)
    table = RequestTable()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    for row in range(SHORT):
        table.append(row, 0, rng.integers(3, VOCAB, 4 + row % 5), greedy, row, NEW)
    table.append(SHORT, 0, rng.integers(3, VOCAB, LONG), greedy, 0, NEW)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    running = engine.start(table)
    order, tokens, errors = [], 0, []
    for group in running.loop.run():
        order.append(group[0].row_index)
        tokens += len(group[0].output_ids or ())
        errors += [str(sample.error) for sample in group if sample.error is not None]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "rows": len(set(order)),
        "tokens": tokens,
        "errors": errors[:3],
        "before_the_long": order.index(SHORT),
        "pool": running.pool.nbytes,
        "grown": grown * 1024,
        **asdict(running.scheduler.stats),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
