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

from batchgen.bench.process import OWN_ENGINES, BenchEngine
from batchgen.bench.workloads import BenchRow, BenchWorkload, plain
from batchgen.errors import BatchgenError
from batchgen.text.tokens.tokenizer import Tokenizer

Ids = Sequence[Sequence[int]]

_CHECKED_ROWS: Final = 6
_CHECKED_ROWS_WITH_PEERS: Final = 20
"""Number of checked rows of runs with peers, which may differ from the reference in a share of them."""
_NEW_TOKENS: Final = 8
_SPECIAL_TOKENS: Final = 32
"""Number of new tokens of checked special rows, enough for a constraint to take effect."""
_SAMPLED_ROWS: Final = 2
FULL_EQUALITY: Final = 0.95
"""Share of rows with the reference's float32 ids below which a peer's figures are marked."""
MIN_EQUALITY: Final = 0.7
"""Share of rows with the reference's float32 ids below which a peer gets no figures."""
MIN_AGREEMENT: Final = 0.25
"""Share of first tokens that an engine in the measured dtype must have in common with float32. With random models
rounding changes many close choices, while with wrong attention hardly any of thousands of ids is right."""


class GateFailed(BatchgenError):
    """An engine's output differs from the reference."""

    def __init__(self, what: str) -> None:
        super().__init__(f"correctness gate failed, no figures: {what}")


def gate_rows(rows: Sequence[BenchRow], *, peers: bool = False, new_tokens: int = _NEW_TOKENS) -> list[BenchRow]:
    """Rows to check, more if there are `peers`: evenly spaced over the workload, at most `new_tokens` long, one sample
    each.
    """
    count = min(_CHECKED_ROWS_WITH_PEERS if peers else _CHECKED_ROWS, len(rows))
    picked = [rows[i * len(rows) // count] for i in range(count)]
    return [replace(row, max_new=min(row.max_new, new_tokens), samples=1) for row in picked]


def check_lengths(workload: str, engine: str, rows: Sequence[BenchRow], outputs: Ids) -> None:
    """Check that every row has the requested number of new tokens; a rate of shorter outputs is not comparable.

    Rows with fields are not checked, because a constraint may end one early.

    Raises:
        GateFailed: a row has a different number of tokens.
    """
    for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        if not row.fields and len(ids) != row.max_new * row.samples:
            raise GateFailed(
                f"{engine} on {workload}, checked row {number} has {len(ids)} new tokens, asked for "
                f"{row.max_new * row.samples}"
            )


@dataclass(frozen=True, slots=True)
class Check:
    """Checks of one engine on one workload. Each generates rows, and raises `GateFailed` if they are wrong."""

    workload: str
    engine: BenchEngine
    setting: Mapping[str, int]

    def exact_ids(self, rows: Sequence[BenchRow], reference: Ids) -> None:
        """All float32 ids equal the reference's; otherwise the message names the first position."""
        for number, (row, ids, expected) in enumerate(zip(rows, self._ids(rows), reference, strict=True)):
            if list(ids) != list(expected):
                pairs = enumerate(zip(ids, expected, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(expected)))
                got, wanted = (str(one[at]) if at < len(one) else "missing" for one in (ids, expected))
                raise self._failure(
                    f"in float32, checked row {number} ({len(row.ids)} prompt tokens): output position {at} is "
                    f"{got}, the reference has {wanted}"
                )

    def equality(self, rows: Sequence[BenchRow], reference: Ids) -> float:
        """Share of rows in which a peer's float32 ids equal the reference's, which is at least `MIN_EQUALITY`.

        A different order of summation sometimes changes a close choice, and with it the later ids of the row, so a peer
        need not be equal in every row; batchgen must be.
        """
        share = _equal_share(self._ids(rows), reference)
        if share < MIN_EQUALITY:
            raise self._failure(
                f"has the reference's ids in {share:.0%} of rows in float32, at least {MIN_EQUALITY:.0%} are needed"
            )
        return share

    def agreement(self, rows: Sequence[BenchRow], reference: Ids) -> float:
        """Share of rows whose first id in the measured dtype equals the reference's, at least `MIN_AGREEMENT`.

        Later ids depend on the first. Every row has its full length.
        """
        outputs = self._ids(rows)
        check_lengths(self.workload, self.engine.name, rows, outputs)
        share = _equal_share([ids[:1] for ids in outputs], [ids[:1] for ids in reference])
        if share < MIN_AGREEMENT:
            raise self._failure(
                f"in {self.engine.dtype} has {share:.0%} of the first tokens of float32, at least {MIN_AGREEMENT:.0%} "
                "are needed"
            )
        return share

    def fields(self, rows: Sequence[BenchRow], tokenizer: Tokenizer) -> None:
        """Compare rows with fields to the same rows without them.

        The output of a row with a JSON schema is the beginning of a JSON text; other rows have the same ids. The number
        of logprobs and hidden states returned is the requested one.
        """
        answer = self.engine.generate(rows, self.setting)
        for number, (row, ids, same) in enumerate(zip(rows, answer.outputs, self._ids(plain(rows)), strict=True)):
            if "json_schema" in row.fields:
                if not continues_to_json(text := tokenizer.decode(ids)):
                    raise self._wrong(f"row {number} is held to a JSON schema and begins {text!r}")
            elif "lora_path" not in row.fields and ids != same:
                raise self._wrong(f"row {number} has other ids with {', '.join(row.fields)} than without")
        for name, count in returned_counts(rows, answer.outputs).items():
            if answer.counted.get(name) != count:
                raise self._wrong(f"{answer.counted.get(name)} {name.replace('_', ' ')} came back, not {count}")

    def adapter(self, rows: Sequence[BenchRow], merged: Ids, bare: Ids) -> None:
        """Compare rows of one adapter to the reference with that adapter `merged`, which differs from the `bare` ids
        without the adapter.
        """
        if list(merged) == list(bare):
            raise self._wrong("the adapter changes no row, so it cannot be checked")
        for number, (ids, expected) in enumerate(zip(self._ids(rows), merged, strict=True)):
            if ids != list(expected):
                raise self._wrong(f"row {number} of an adapter gives {ids}, the merged model {list(expected)}")

    def samples(self, rows: Sequence[BenchRow], *, replays: bool) -> None:
        """Check the number, length and variety of random samples and, if the engine `replays`, that seeds reproduce
        them.
        """
        outputs = self._ids(rows)
        for number, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
            if len(ids) != row.samples * row.max_new:
                raise self._wrong(f"row {number} has {len(ids)} ids, not {row.samples} samples of {row.max_new}")
            if len({tuple(ids[at : at + row.max_new]) for at in range(0, len(ids), row.max_new)}) == 1:
                raise self._wrong(f"the {row.samples} samples of row {number} are all equal")
        if replays and self._ids(rows) != outputs:
            raise self._wrong("samples differ when generated again with the same seeds")

    def _ids(self, rows: Sequence[BenchRow]) -> list[list[int]]:
        return self.engine.generate(rows, self.setting).outputs

    def _failure(self, what: str) -> GateFailed:
        return GateFailed(f"{self.engine.name} on {self.workload} {what}")

    def _wrong(self, what: str) -> GateFailed:
        return self._failure(f"in {self.engine.dtype}: {what}")


def _equal_share(outputs: Ids, reference: Ids) -> float:
    return sum(list(a) == list(b) for a, b in zip(outputs, reference, strict=True)) / len(reference)


def returned_counts(rows: Sequence[BenchRow], outputs: Ids) -> dict[str, int]:
    """Number of logprobs and hidden states that the rows request, by the names of an engine's `counted`."""
    counts = {"top_logprobs": 0, "output_states": 0}
    for row, ids in zip(rows, outputs, strict=True):
        counts["top_logprobs"] += row.fields.get("top_logprobs_num", 0) * len(ids)
        if wanted := row.fields.get("return_hidden_states"):
            counts["output_states"] += len(wanted["layers"]) * len(ids)
    return {name: count for name, count in counts.items() if count}


_LITERALS: Final = ("true", "false", "null")
_TRUNCATED_NUMBER: Final = re.compile(r"-|\.|[eE][+-]?")
"""Possible endings of a truncated number after its last complete digits."""
_TRUNCATED_ESCAPE: Final = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")


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
        drawn = {workload.name: workload.rows(vocab) for workload in workloads}
        special = [workload.name for workload in workloads if workload.special]
        return Gate(
            workloads,
            {name: plain(gate_rows(rows, peers=peers)) for name, rows in drawn.items()},
            {name: gate_rows(drawn[name], new_tokens=_SPECIAL_TOKENS) for name in special},
        )

    def record_reference(self, engine: BenchEngine) -> None:
        """Generate and store the reference's ids, one row at a time."""
        self.expected.update((name, engine.generate(rows, {"batch": 1}).outputs) for name, rows in self.rows.items())

    def record_merged(self, workload: BenchWorkload, engine: BenchEngine) -> None:
        """Generate and store the ids of a reference with the workload's first adapter merged."""
        self.merged[workload.name] = engine.generate(plain(self._adapter_rows(workload)), {"batch": 1}).outputs

    def check_float32(self, workload: BenchWorkload, engine: BenchEngine, model: str) -> None:
        """Check an engine in float32 on a workload; `model` is the folder of the tokenizer.

        Raises:
            GateFailed: the engine's output is wrong.
        """
        name, ours = workload.name, engine.name in OWN_ENGINES
        check = Check(name, engine, engine.settings[0])
        if ours:
            check.exact_ids(self.rows[name], self.expected[name])
        else:
            self.equal[engine.name, name] = check.equality(self.rows[name], self.expected[name])
        if workload.samples > 1:
            sampled = [replace(row, samples=workload.samples) for row in self.rows[name][:_SAMPLED_ROWS]]
            check.samples(sampled, replays=ours)
        if workload.special:
            check.fields(self.special[name], Tokenizer.load(model))
        if name in self.merged:
            adapted = self._adapter_rows(workload)
            bare = engine.generate(plain(adapted), check.setting).outputs
            check.adapter(adapted, self.merged[name], bare)

    def check_measured_dtype(self, workload: BenchWorkload, engine: BenchEngine, setting: Mapping[str, int]) -> float:
        """`Check.agreement` of an engine in the measured dtype; also warms up its special rows.

        Raises:
            GateFailed: the agreement is too small.
        """
        name = workload.name
        if workload.special:
            engine.generate(self.special[name], setting)
        return Check(name, engine, setting).agreement(self.rows[name], self.expected[name])

    def _adapter_rows(self, workload: BenchWorkload) -> list[BenchRow]:
        """The checked rows of the workload's first adapter, as long as those of `rows`; at least one."""
        assert workload.adapters is not None
        name, special = workload.adapters.name(0), self.special[workload.name]
        own = [row for row in special if row.fields["lora_path"] == name]
        rows = own or [replace(special[0], fields={"lora_path": name})]
        return [replace(row, max_new=self.rows[workload.name][0].max_new) for row in rows]
