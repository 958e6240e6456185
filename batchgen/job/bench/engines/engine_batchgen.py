"""batchgen itself, through its Python API: rows in, planning and all, completions out.

torch is not imported before `batchgen.Engine` is asked for, which tells it how its threads wait.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import batchgen
from batchgen.data.states import StateRecord, write_states_part
from batchgen.data.states_result import write_states_result

_NEVER = 1 << 40
"""Reads of cached positions that no prefix group saves."""


class Engine:
    """One model in memory."""

    version = batchgen.__version__

    def __init__(self, model: str, dtype: str, device: str, threads: int, options: dict[str, Any]) -> None:
        options = dict(options)
        order, admission = options.pop("order", "longest"), options.pop("admission", "foreseen")
        self._engine = batchgen.Engine(model, dtype=dtype, device=device, cpu_threads=threads, **options)
        self._engine.order, self._engine.admission = order, admission

    def describe(self) -> dict[str, Any]:
        """What is in force. There is nothing to try: its own defaults are what a user gets."""
        import torch

        spec = self._engine.model.spec
        return {
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": spec.device.type,
            "threads": torch.get_num_threads(),
            "settings": [{}],
        }

    def generate(self, rows: list[dict[str, Any]], setting: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy but for rows of several samples, lengths fixed.

        The setting `{"flat": 1}` has every row read a shared prefix by itself, as engines do that only cache it.
        """
        collected = _Collected(len(rows))
        with _flat() if setting.get("flat") else nullcontext():
            completions = self._engine.generate([_asked(row) for row in rows])
            if any("return_hidden_states" in row.get("fields", {}) for row in rows):
                _write_states(collected.records(completions))
            else:
                for completion in completions:
                    collected.add(completion)
        running = self._engine.last_run
        assert running is not None
        stats = running.scheduler.stats
        page_bytes, times = running.page_bytes, running.loop.times.milliseconds()
        del running
        if self._engine.model.spec.device.type == "cuda":
            import torch

            self._engine.last_run = None  # its pool: peers in other processes are to find the memory free
            torch.cuda.empty_cache()
        return collected.outputs, {
            **{name: count for name, count in collected.returned.items() if count},
            "prompt_tokens_computed": stats.prompt_tokens + stats.recomputed_tokens + stats.relogit_tokens,
            "decode_rows": stats.decode_tokens,
            "steps": stats.steps,
            # An older checkout may have no such counts.
            **{name: getattr(stats, name) for name in ("slots", "tail_steps", "tail_tokens") if hasattr(stats, name)},
            "preemptions": stats.preemptions,
            "decode_kv_positions": stats.decode_kv_positions,
            "decode_kv_reads": stats.decode_kv_reads,
            "kv_peak_bytes": stats.peak_pages * page_bytes,
            **times,
        }


class _Collected:
    """What a pass gave."""

    def __init__(self, rows: int) -> None:
        self.outputs: list[list[int]] = [[] for _ in range(rows)]
        self.returned = {"top_logprobs": 0, "output_states": 0}

    def add(self, completion: Any) -> None:
        if completion.error is not None:
            raise RuntimeError(f"row {completion.row_index}: {completion.error.message}")
        self.outputs[completion.row_index] += [int(i) for i in completion.output_ids or ()]
        if completion.output_top_logprobs is not None:
            self.returned["top_logprobs"] += len(completion.output_top_logprobs)
        self.returned["output_states"] += sum(len(block.values) for block in completion.states or ())

    def records(self, completions: Iterable[Any]) -> Iterator[StateRecord]:
        """Each completion's states, as soon as it is there."""
        for completion in completions:
            self.add(completion)
            for block in completion.states or ():
                yield StateRecord(completion.key, str(completion.row_index), block)


def _write_states(records: Iterable[StateRecord]) -> None:
    """As a job leaves them: a part of the work folder, then the Parquet file; both durable."""
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as folder:
        part = Path(folder) / "states" / "part-000000.states"
        write_states_part(part, records)
        write_states_result(Path(folder) / "out.hidden.parquet", [part], {})


def _asked(row: dict[str, Any]) -> dict[str, Any]:
    samples = row.get("samples", 1)
    params = {"temperature": 0 if samples == 1 else 1.0, "max_new_tokens": row["max_new"], "ignore_eos": True}
    if samples > 1:
        params |= {"n": samples, "top_k": -1, "top_p": 1.0}
    return {"input_ids": row["ids"], **params, **row.get("fields", {})}


@contextmanager
def _flat() -> Iterator[None]:
    """No prefix groups. Users have no such option: it only ever costs."""
    from batchgen.engine import engine

    before = engine.group_min_saving
    engine.group_min_saving = lambda *given: _NEVER
    try:
        yield
    finally:
        engine.group_min_saving = before


def load(request: dict[str, Any]) -> Engine:
    """An engine for the driver's request."""
    return Engine(request["model"], request["dtype"], request["device"], request["threads"], request.get("options", {}))
