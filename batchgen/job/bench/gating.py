"""The gate of one run: which rows are checked, what the reference says of them, and which engines say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from batchgen.job.bench.definitions import BenchWorkload
from batchgen.job.bench.gate import check_exact, check_peer, check_share, gate_rows
from batchgen.job.bench.peers import OF_BATCHGEN
from batchgen.job.bench.process import BenchEngine
from batchgen.job.bench.special import check_adapted, check_fields, check_samples, gate_samples
from batchgen.job.bench.workloads import BenchRow, plain
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Gate"]

_SPECIAL_TOKENS = 32
"""New tokens of special rows: enough to be inside a constraint."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What is checked, and what was found, by workload."""

    workloads: Sequence[BenchWorkload]
    rows: Mapping[str, list[BenchRow]]
    """Greedy rows without fields: what the reference can say something of."""
    special: Mapping[str, list[BenchRow]]
    """Rows of special workloads with their fields."""
    expected: dict[str, list[list[int]]] = field(default_factory=dict)
    """The reference's ids of `rows`."""
    merged: dict[str, list[list[int]]] = field(default_factory=dict)
    """The reference's ids of the rows of a workload's first adapter, with that merged into its weights."""
    equal: dict[tuple[str, str], float] = field(default_factory=dict)
    """(peer, workload) -> share of rows with the expected ids in float32."""

    @staticmethod
    def of(workloads: Sequence[BenchWorkload], vocab: int, *, peers: bool) -> Gate:
        """The rows to check; more of them where `peers` are held to a share."""
        rows, special = {}, {}
        for workload in workloads:
            picked = workload.rows(vocab)
            rows[workload.name] = plain(gate_rows(picked, peers=peers))
            if workload.special:
                wide = gate_rows(picked, peers=False, new_tokens=_SPECIAL_TOKENS)
                special[workload.name] = wide
        return Gate(workloads, rows, special)

    def ask_reference(self, engine: BenchEngine) -> None:
        """Take the reference's ids, one row at a time."""
        for name, rows in self.rows.items():
            self.expected[name] = engine.generate(rows, {"batch": 1}).outputs

    def ask_merged(self, workload: BenchWorkload, engine: BenchEngine) -> None:
        """Take the ids of a reference that has the workload's first adapter merged."""
        self.merged[workload.name] = engine.generate(plain(self._adapted(workload)), {"batch": 1}).outputs

    def hold(self, workload: BenchWorkload, engine: BenchEngine, model: str) -> None:
        """Check an engine in float32 on a workload; `model` is the folder of the tokenizer.

        Raises:
            GateRed: it is not correct.
        """
        name, setting = workload.name, engine.settings[0]
        ours = engine.name in OF_BATCHGEN
        if ours:
            check_exact(name, engine, setting, self.rows[name], self.expected[name])
        else:
            share = check_peer(name, engine, setting, self.rows[name], self.expected[name])
            self.equal[engine.name, name] = share
        if workload.samples > 1:
            drawn = gate_samples(self.rows[name], workload.samples)
            check_samples(name, engine, setting, drawn, replays=ours)
        if workload.special:
            check_fields(name, engine, setting, self.special[name], Tokenizer.load(model))
        if name in self.merged:
            adapted = self._adapted(workload)
            bare = engine.generate(plain(adapted), setting).outputs
            check_adapted(name, engine, setting, adapted, self.merged[name], bare)

    def share(self, workload: BenchWorkload, engine: BenchEngine, setting: Mapping[str, int]) -> float:
        """The agreement of an engine in the measured dtype, whose special rows this also warms up.

        Raises:
            GateRed: it is too small.
        """
        if workload.special:
            engine.generate(self.special[workload.name], setting)
        return check_share(workload.name, engine, setting, self.rows[workload.name], self.expected[workload.name])

    def _adapted(self, workload: BenchWorkload) -> list[BenchRow]:
        """The checked rows of the workload's first adapter, as long as the plain ones; one at least."""
        assert workload.adapters is not None
        name = workload.adapters.name(0)
        own = [row for row in self.special[workload.name] if row.fields["lora_path"] == name]
        kept = own or [replace(self.special[workload.name][0], fields={"lora_path": name})]
        return [replace(row, max_new=self.rows[workload.name][0].max_new) for row in kept]
