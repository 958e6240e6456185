"""The correctness gate: an engine gets figures only if its greedy ids equal those of the reference in float32.

Special rows (`fields`, adapters, samples) are checked as well: the engine must return what they request, and the
request must not change the ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from batchgen.bench.peers import OWN_ENGINES
from batchgen.bench.process import BenchEngine
from batchgen.bench.workload_defs import BenchWorkload
from batchgen.bench.workloads import BenchRow, plain
from batchgen.errors import BatchgenError
from batchgen.text.tokenizer import Tokenizer

__all__ = [
    "FULL_EQUALITY",
    "Gate",
    "GateFailed",
    "agreement",
    "check_adapter",
    "check_agreement",
    "check_exact_ids",
    "check_fields",
    "check_lengths",
    "check_peer",
    "check_samples",
    "continues_to_json",
    "gate_rows",
    "gate_samples",
    "returned_counts",
]

_CHECKED_ROWS = 6
_CHECKED_ROWS_WITH_PEERS = 20
"""Number of checked rows of runs with peers, which may differ from the reference in a share of them."""
_NEW_TOKENS = 8
FULL_EQUALITY = 0.95
"""Share of rows with the reference's float32 ids below which a peer's figures are marked."""
MIN_EQUALITY = 0.7
"""Share of rows with the reference's float32 ids below which a peer gets no figures."""
MIN_AGREEMENT = 0.25
"""Share of first tokens that an engine in the measured dtype must have in common with float32. With random models
rounding changes many close choices, while with wrong attention hardly any of thousands of ids is right."""


class GateFailed(BatchgenError):
    """An engine's output differs from the reference."""


def gate_rows(rows: Sequence[BenchRow], *, peers: bool = False, new_tokens: int = _NEW_TOKENS) -> list[BenchRow]:
    """Rows to check: evenly spaced over the workload, at most `new_tokens` long, one sample each.

    Args:
        rows: the workload.
        peers: whether peers are checked, which takes more rows.
        new_tokens: largest number of new tokens.
    """
    count = min(_CHECKED_ROWS_WITH_PEERS if peers else _CHECKED_ROWS, len(rows))
    picked = [rows[i * len(rows) // count] for i in range(count)]
    return [replace(row, max_new=min(row.max_new, new_tokens), samples=1) for row in picked]


def check_exact_ids(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> None:
    """Check that an engine's float32 ids equal the reference's.

    Raises:
        GateFailed: they differ; the message names the first position.
    """
    outputs = engine.generate(rows, setting).outputs
    for number, (row, ids, expected) in enumerate(zip(rows, outputs, reference, strict=True)):
        if ids != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected))
            )
            raise GateFailed(
                f"correctness gate failed, no figures: {engine.name} on {workload} in float32, checked row {number} "
                f"({len(row.ids)} prompt tokens): output position {at} is {_id_at(ids, at)}, the reference has "
                f"{_id_at(expected, at)}"
            )


def check_peer(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> float:
    """Share of rows in which a peer's float32 ids equal the reference's.

    A different order of summation sometimes changes a close choice, and with it the later ids of the row, so a peer
    need not be equal in every row; batchgen must be.

    Raises:
        GateFailed: the share is below `MIN_EQUALITY`.
    """
    outputs = engine.generate(rows, setting).outputs
    share = sum(list(a) == list(b) for a, b in zip(outputs, reference, strict=True)) / len(reference)
    if share < MIN_EQUALITY:
        raise GateFailed(
            f"correctness gate failed, no figures: {engine.name} on {workload} has the reference's ids in {share:.0%} "
            f"of rows in float32, at least {MIN_EQUALITY:.0%} are needed"
        )
    return share


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Share of rows whose first token equals the reference's; later tokens depend on the first."""
    same = sum(list(a[:1]) == list(b[:1]) for a, b in zip(outputs, reference, strict=True))
    return same / len(reference)


def check_agreement(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], reference: list[list[int]]
) -> float:
    """`agreement` of an engine in the measured dtype with the float32 reference.

    Raises:
        GateFailed: the agreement is below `MIN_AGREEMENT`, or a row does not have its full length.
    """
    outputs = engine.generate(rows, setting).outputs
    check_lengths(workload, engine.name, rows, outputs)
    share = agreement(outputs, reference)
    if share < MIN_AGREEMENT:
        raise GateFailed(
            f"correctness gate failed, no figures: {engine.name} on {workload} in {engine.dtype} has {share:.0%} of "
            f"the first tokens of float32, at least {MIN_AGREEMENT:.0%} are needed"
        )
    return share


def check_lengths(workload: str, engine: str, rows: Sequence[BenchRow], outputs: Sequence[Sequence[int]]) -> None:
    """Check that every row has the requested number of new tokens; a rate of shorter outputs is not comparable.

    Rows with fields are not checked, because a constraint may end one early.

    Raises:
        GateFailed: a row has a different number of tokens.
    """
    for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        if not row.fields and len(ids) != row.max_new * row.samples:
            raise GateFailed(
                f"correctness gate failed, no figures: {engine} on {workload}, checked row {number} has "
                f"{len(ids)} new tokens, asked for {row.max_new * row.samples}"
            )


def _id_at(ids: Sequence[int], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "missing"


_LITERALS: Final = ("true", "false", "null")
_TRUNCATED_NUMBER: Final = re.compile(r"-|\.|[eE][+-]?")
"""Possible endings of a truncated number after its last complete digits."""
_TRUNCATED_ESCAPE: Final = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")


def check_fields(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], tokenizer: Tokenizer
) -> None:
    """Compare rows with fields to the same rows without them, generated by the same engine.

    The output of a row with a JSON schema must be the beginning of a JSON text; other rows must have the same ids. The
    number of logprobs and hidden states returned must be the requested one.

    Raises:
        GateFailed: ids differ, or something is missing.
    """
    found = engine.generate(rows, setting)
    expected = engine.generate(plain(rows), setting).outputs
    for number, (row, ids, same) in enumerate(zip(rows, found.outputs, expected, strict=True)):
        if "json_schema" in row.fields:
            if not continues_to_json(text := tokenizer.decode(ids)):
                raise _failure(workload, engine, f"row {number} is held to a JSON schema and begins {text!r}")
        elif "lora_path" not in row.fields and ids != same:
            raise _failure(workload, engine, f"row {number} has other ids with {', '.join(row.fields)} than without")
    for name, count in returned_counts(rows, found.outputs).items():
        if found.counted.get(name) != count:
            raise _failure(
                workload, engine, f"{found.counted.get(name)} {name.replace('_', ' ')} came back, not {count}"
            )


def check_adapter(
    workload: str,
    engine: BenchEngine,
    setting: Mapping[str, int],
    rows: Sequence[BenchRow],
    merged: Sequence[Sequence[int]],
    bare: Sequence[Sequence[int]],
) -> None:
    """Compare rows of one adapter to the model with that adapter merged.

    Args:
        workload: name of the workload, for error messages.
        engine: the engine, with the adapters loaded.
        setting: the engine's setting.
        rows: rows of that adapter.
        merged: ids of the reference with the merged weights.
        bare: ids without the adapter.

    Raises:
        GateFailed: ids differ from the merged model's, or the adapter changes nothing.
    """
    if list(merged) == list(bare):
        raise _failure(workload, engine, "the adapter changes no row, so it cannot be checked")
    outputs = engine.generate(rows, setting).outputs
    for number, (ids, expected) in enumerate(zip(outputs, merged, strict=True)):
        if ids != list(expected):
            raise _failure(
                workload, engine, f"row {number} of an adapter gives {ids}, the merged model {list(expected)}"
            )


def check_samples(
    workload: str, engine: BenchEngine, setting: Mapping[str, int], rows: Sequence[BenchRow], *, replays: bool
) -> None:
    """Check the number, length and variety of random samples and, if the engine `replays`, that seeds reproduce them.

    Raises:
        GateFailed: samples are missing, all equal, or different when generated again.
    """
    outputs = engine.generate(rows, setting).outputs
    for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        if len(ids) != row.samples * row.max_new:
            raise _failure(
                workload, engine, f"row {number} has {len(ids)} ids, not {row.samples} samples of {row.max_new}"
            )
        samples = {tuple(ids[at : at + row.max_new]) for at in range(0, len(ids), row.max_new)}
        if len(samples) == 1:
            raise _failure(workload, engine, f"the {row.samples} samples of row {number} are all equal")
    if replays and engine.generate(rows, setting).outputs != outputs:
        raise _failure(workload, engine, "samples differ when generated again with the same seeds")


def returned_counts(rows: Sequence[BenchRow], outputs: Sequence[Sequence[int]]) -> dict[str, int]:
    """Number of logprobs and hidden states that the rows request, by the names of an engine's `counted`."""
    counts = {"top_logprobs": 0, "output_states": 0}
    for row, ids in zip(rows, outputs, strict=True):
        counts["top_logprobs"] += row.fields.get("top_logprobs_num", 0) * len(ids)
        if wanted := row.fields.get("return_hidden_states"):
            counts["output_states"] += len(wanted["layers"]) * len(ids)
    return {name: count for name, count in counts.items() if count}


def continues_to_json(text: str) -> bool:
    """Whether `text` is the beginning of some JSON text."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if not rest.strip() or error.msg.startswith("Unterminated string"):
            return True
        if error.msg.startswith("Invalid \\u"):
            return _TRUNCATED_ESCAPE.fullmatch(rest) is not None
        return _TRUNCATED_NUMBER.fullmatch(rest) is not None or any(word.startswith(rest) for word in _LITERALS)
    return True


def gate_samples(rows: Sequence[BenchRow], samples: int) -> list[BenchRow]:
    """The first two of the checked rows, with `samples` samples each."""
    return [replace(row, samples=samples) for row in rows[:2]]


def _failure(workload: str, engine: BenchEngine, what: str) -> GateFailed:
    return GateFailed(f"correctness gate failed, no figures: {engine.name} on {workload} in {engine.dtype}: {what}")


_SPECIAL_TOKENS = 32
"""Number of new tokens of checked special rows, enough for a constraint to take effect."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The correctness gate of one run: checked rows, reference outputs and results, by workload name."""

    workloads: Sequence[BenchWorkload]
    rows: Mapping[str, list[BenchRow]]
    """Checked rows: greedy, without fields, so that the reference can generate them."""
    special: Mapping[str, list[BenchRow]]
    """Checked rows of special workloads, with their fields."""
    expected: dict[str, list[list[int]]] = field(default_factory=dict)
    """Ids of the reference for `rows`."""
    merged: dict[str, list[list[int]]] = field(default_factory=dict)
    """Ids of the reference with the workload's first adapter merged, for the rows of that adapter."""
    equal: dict[tuple[str, str], float] = field(default_factory=dict)
    """(peer, workload) -> share of rows with the reference's ids in float32."""

    @staticmethod
    def of(workloads: Sequence[BenchWorkload], vocab: int, *, peers: bool) -> Gate:
        """A gate for these workloads, with more rows if `peers` are checked."""
        rows, special = {}, {}
        for workload in workloads:
            picked = workload.rows(vocab)
            rows[workload.name] = plain(gate_rows(picked, peers=peers))
            if workload.special:
                wide = gate_rows(picked, peers=False, new_tokens=_SPECIAL_TOKENS)
                special[workload.name] = wide
        return Gate(workloads, rows, special)

    def record_reference(self, engine: BenchEngine) -> None:
        """Generate and store the reference's ids, one row at a time."""
        for name, rows in self.rows.items():
            self.expected[name] = engine.generate(rows, {"batch": 1}).outputs

    def record_merged(self, workload: BenchWorkload, engine: BenchEngine) -> None:
        """Generate and store the ids of a reference with the workload's first adapter merged."""
        self.merged[workload.name] = engine.generate(plain(self._adapter_rows(workload)), {"batch": 1}).outputs

    def check_float32(self, workload: BenchWorkload, engine: BenchEngine, model: str) -> None:
        """Check an engine in float32 on a workload; `model` is the folder of the tokenizer.

        Raises:
            GateFailed: the engine's output is wrong.
        """
        name, setting = workload.name, engine.settings[0]
        ours = engine.name in OWN_ENGINES
        if ours:
            check_exact_ids(name, engine, setting, self.rows[name], self.expected[name])
        else:
            share = check_peer(name, engine, setting, self.rows[name], self.expected[name])
            self.equal[engine.name, name] = share
        if workload.samples > 1:
            sampled = gate_samples(self.rows[name], workload.samples)
            check_samples(name, engine, setting, sampled, replays=ours)
        if workload.special:
            check_fields(name, engine, setting, self.special[name], Tokenizer.load(model))
        if name in self.merged:
            adapted = self._adapter_rows(workload)
            bare = engine.generate(plain(adapted), setting).outputs
            check_adapter(name, engine, setting, adapted, self.merged[name], bare)

    def check_measured_dtype(self, workload: BenchWorkload, engine: BenchEngine, setting: Mapping[str, int]) -> float:
        """`check_agreement` of an engine in the measured dtype; also warms up its special rows.

        Raises:
            GateFailed: the agreement is too small.
        """
        if workload.special:
            engine.generate(self.special[workload.name], setting)
        return check_agreement(workload.name, engine, setting, self.rows[workload.name], self.expected[workload.name])

    def _adapter_rows(self, workload: BenchWorkload) -> list[BenchRow]:
        """The checked rows of the workload's first adapter, as long as those of `rows`; at least one."""
        assert workload.adapters is not None
        name = workload.adapters.name(0)
        own = [row for row in self.special[workload.name] if row.fields["lora_path"] == name]
        found = own or [replace(self.special[workload.name][0], fields={"lora_path": name})]
        return [replace(row, max_new=self.rows[workload.name][0].max_new) for row in found]
