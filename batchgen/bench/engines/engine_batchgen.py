"""batchgen through its Python API, including planning.

Accessing `batchgen.Engine` configures the waiting of torch's threads, so torch must not be imported before.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import batchgen
from batchgen.bench.engines.peer_tools import Outputs, PeerEngine, Row, Setting

_UNREACHABLE_SAVING = 1 << 40
"""Threshold of saved KV reads that no prefix group reaches."""


class Engine(PeerEngine):
    """One model in memory, with no settings to try: users get the defaults."""

    version = batchgen.__version__

    def __init__(self, request: dict[str, Any]) -> None:
        options = dict(request.get("options", {}))
        order, admission = options.pop("order", "longest"), options.pop("admission", "foreseen")
        self._engine = batchgen.Engine(
            request["model"],
            dtype=request["dtype"],
            device=request["device"],
            cpu_threads=request["threads"],
            **options,
        )
        self._engine.order, self._engine.admission = order, admission
        import torch

        spec = self._engine.model.spec
        self.dtype, self.device = str(spec.dtype).removeprefix("torch."), spec.device.type
        self.threads = torch.get_num_threads()

    def generate(self, rows: list[Row], setting: Setting) -> Outputs:
        """See `PeerEngine`.

        The setting `{"flat": 1}` disables prefix groups: every row reads its prefix itself, as with a prefix cache.
        """
        collected: list[list[int]] = [[] for _ in rows]
        returned = {"top_logprobs": 0, "output_states": 0}

        def states() -> Iterator[tuple[Any, str, Any]]:
            """Collect each completion; key, row and block of its hidden states."""
            for completion in self._engine.generate([_request_row(row) for row in rows], progress=False):
                if completion.error is not None:
                    raise RuntimeError(f"row {completion.row_index}: {completion.error.message}")
                collected[completion.row_index] += [int(i) for i in completion.output_ids or ()]
                if completion.output_top_logprobs is not None:
                    returned["top_logprobs"] += len(completion.output_top_logprobs)
                for block in completion.states or ():
                    returned["output_states"] += len(block.values)
                    yield completion.key, str(completion.row_index), block

        with _without_prefix_groups() if setting.get("flat") else nullcontext():
            if any("return_hidden_states" in row["fields"] for row in rows):
                _write_states(states())
            else:
                deque(states(), 0)
        running = self._engine.last_run
        assert running is not None
        stats = running.scheduler.stats
        peaks, times = getattr(running, "kv_peak_bytes", None), running.loop.times.milliseconds()
        graphs = {name: count for name, count in running.loop.counts().items() if name.startswith("graph_")}
        del running
        if self._engine.model.spec.device.type == "cuda":
            import torch

            self._engine.last_run = None  # frees its KV cache, so that peers in other processes have the memory
            torch.cuda.empty_cache()
        return collected, {
            **{name: count for name, count in returned.items() if count},
            "prompt_tokens_computed": stats.prompt_tokens + stats.recomputed_tokens + stats.recomputed_last_tokens,
            "decode_rows": stats.decode_tokens,
            "steps": stats.steps,
            # Older checkouts, run as `baseline`, may lack these counts.
            **{name: getattr(stats, name) for name in ("slots", "tail_steps", "tail_tokens") if hasattr(stats, name)},
            "preemptions": stats.preemptions,
            "decode_kv_positions": stats.decode_kv_positions,
            "decode_kv_reads": stats.decode_kv_reads,
            **({} if peaks is None else {"kv_peak_bytes": sum(peaks.values())}),
            **times,
            **graphs,
        }


def _write_states(records: Iterable[tuple[Any, str, Any]]) -> None:
    """Write hidden states as a job does: a part in a work folder, then the Parquet file, both synced to disk."""
    from batchgen.data.states import StateRecord, write_states_part  # elsewhere in older checkouts
    from batchgen.data.states_result import write_states_result

    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as folder:
        part = Path(folder) / "states" / "part-000000.states"
        write_states_part(part, (StateRecord(*record) for record in records))
        write_states_result(Path(folder) / "out.hidden.parquet", [part], {})


def _request_row(row: Row) -> dict[str, Any]:
    samples = row["samples"]
    params = {"temperature": 0 if samples == 1 else 1.0, "max_new_tokens": row["max_new"], "ignore_eos": True}
    if samples > 1:
        params |= {"n": samples, "top_k": -1, "top_p": 1.0}
    images = {"image_data": row["image"]} if row.get("image") else {}
    return {"input_ids": row["ids"], **images, **params, **row["fields"]}


@contextmanager
def _without_prefix_groups() -> Iterator[None]:
    """Context manager that disables prefix groups. Users have no such option, because it only costs time."""
    from batchgen.engine import engine

    names = vars(engine)  # of the module that plans jobs
    before = names["group_min_saving"]
    names["group_min_saving"] = lambda *_: _UNREACHABLE_SAVING
    try:
        yield
    finally:
        names["group_min_saving"] = before
