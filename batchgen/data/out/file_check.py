"""`batchgen verify OUT --file`: whether files are what was written, and whole, without computing anything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.data.files import exists, files_in, is_file, is_folder, open_named, resolved
from batchgen.data.lines import is_lines, line_files, line_mark
from batchgen.data.out.view import read_errors
from batchgen.data.results_file import DamagedFile, StoredTable, open_parquet, read_footer
from batchgen.data.row_shapes import RowShapes
from batchgen.data.schema import ASKED, KEY_COLUMNS, SCHEMA, STATES_CONTENTS
from batchgen.data.store.committed import checked_keys, doubled_parts
from batchgen.data.store.work_folder import output_paths
from batchgen.data.store.work_parts import part_files
from batchgen.data.store.work_state import STATE_NAME, read_state, state_damage
from batchgen.errors import InputError
from batchgen.request.foreign_text import read_json
from batchgen.request.printable import printable

_NEVER_NULL: Final = (*KEY_COLUMNS, "id", "status")
_STATE_KEYS: Final = (*KEY_COLUMNS, "layer")
_BATCH_ID: Final = re.compile(r"batch_req_[0-9a-f]{12}([0-9a-f]{12,})")
_OLD: Final = "without checksums over every byte (an earlier version or another program wrote it)"


@dataclass(slots=True)
class Finding:
    """Result of the check of one file."""

    path: Path
    problems: list[str] = field(default_factory=list)
    """What is wrong; empty if nothing is."""
    rows: int = 0
    errors: int = 0
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The finding in one line."""
        if self.problems:
            return f"{self.path}: {'; '.join(self.problems)}"
        return ", ".join([f"{self.path}: intact", f"{self.rows:,} rows, {self.errors:,} errors", *self.notes])


def check_files(out: Path) -> Iterator[Finding]:
    """Check the files of an output, of a folder of shards, or of unfinished work.

    Args:
        out: a finished output or its hidden states, a folder of shards, a work folder, or an output that is not
            finished.

    Raises:
        InputError: there is nothing to check, or a file cannot be read.
    """
    out = out if out.name not in ("", "..") else resolved(out)
    if not out.name:
        raise InputError(f"{out} is a folder without results. Name a result file, or a folder of shards.")
    work = output_paths(out).work
    if is_folder(out):
        shards = files_in(out, "part-*.parquet")
        folders = [out, *files_in(out, "part-*-of-*"), *files_in(work, "part-*")]
        folders = [folder for folder in folders if exists(folder / STATE_NAME) or part_files(folder)]
        if not shards and not folders:
            raise InputError(f"{out} is a folder without results. Name a result file, or a folder of shards.")
        for shard in shards:
            yield from _output(shard, output_paths(out.absolute()).states / shard.name)
        for folder in folders:
            yield from _work(folder)
    elif is_file(out):
        yield from _lines(out) if is_lines(out) else _output(out, output_paths(out).states)
    elif part_files(work):
        yield from _work(work)
    else:
        raise InputError(f"{out} does not exist, and there is no unfinished work for it. Check the name.")


def _output(path: Path, states: Path) -> Iterator[Finding]:
    finding = Finding(path)
    try:
        if read_footer(path, STATES_CONTENTS) is not None:
            yield _states(path, None)
            return
        run = read_footer(path)
        if run is None:
            raise InputError(f"{path} is not a batchgen output.")
        with open_parquet(path) as table:
            table.check()
            if not run.get("columns"):
                _check_results(table, run, finding)
    except DamagedFile as problem:
        finding.problems.append(f"damaged ({problem.reason})")
        run = None
    yield finding
    if run and run.get("states"):
        yield _states(states, run)


def _check_results(table: StoredTable, run: Mapping[str, Any], finding: Finding) -> None:
    """Check the rows of an output against each other, its footer and the rules of its columns."""
    problems, nulls = finding.problems, Counter[str]()
    if not table.has_checksums:
        finding.notes.append(_OLD)
    types = {field.name: (field.type, ASKED.get(field.name, field).type) for field in (*ASKED.values(), *SCHEMA)}
    wrong = [f.name for f in table.schema if all(f.type != known for known in types.get(f.name, (f.type,)))]
    missing = [name for name in (*_NEVER_NULL, "error") if name not in table.schema.names]
    if wrong or missing:
        problems.append(f"wrong columns: {', '.join([*missing, *wrong])}")
        return
    last, distinct = (-1, 0, 0), 0
    for group in table.groups():
        nulls.update({name: column.null_count for name, column in zip(table.schema.names, group.columns, strict=True)})
        problems += _broken_rules(group)
        keys = [group[name].to_numpy() for name in KEY_COLUMNS]
        if group.num_rows and not _follow(keys, last):
            problems.append("its rows are not in order, or a sample is missing or there twice")
            return
        distinct += int(np.count_nonzero(np.diff(keys[0], prepend=last[0])))
        last = (int(keys[0][-1]), int(keys[1][-1]), int(keys[2][-1])) if group.num_rows else last
        finding.errors += int(pc.sum(pc.equal(group["status"], "error")).as_py() or 0)
    finding.rows = len(table)
    if table.has_checksums and table.nulls is not None and nulls != table.nulls:
        problems.append("its columns do not have the nulls that were written")
    problems += _wrong_counts(len(table), distinct, run)


def _broken_rules(group: pa.Table) -> Iterator[str]:
    """Rules of nulls: keys have none, and a row has an error if and only if its status says so."""
    for name in _NEVER_NULL:
        if group[name].null_count:
            yield f"{group[name].null_count} rows have no {name}"
    failed = pc.equal(group["status"], "error")
    if not pc.all(pc.or_(failed, pc.equal(group["status"], "ok"))).as_py() and len(group):
        yield "a status is neither ok nor error"
    if len(group) and pc.any(pc.xor(failed, group["error"].is_valid())).as_py():
        yield "a row has an error without the status, or the status without an error"


def _follow(keys: list[npt.NDArray[Any]], last: tuple[int, int, int]) -> bool:
    """Whether keys are in order and complete: each prompt of a row, from 0, and each sample of a prompt, from 0."""
    row, prompt, sample = (np.concatenate([[before], own]) for before, own in zip(last, keys, strict=True))
    new_row, new_prompt = np.diff(row) != 0, np.diff(prompt) != 0
    first, later = sample[1:] == 0, sample[1:] == sample[:-1] + 1
    begins = (row[1:] > row[:-1]) & (prompt[1:] == 0) & first
    continues = np.where(new_prompt, (prompt[1:] == prompt[:-1] + 1) & first, later)
    return bool(np.where(new_row, begins, continues).all())


def _wrong_counts(rows: int, distinct: int, run: Mapping[str, Any]) -> Iterator[str]:
    """Counts of the footer that are not those of the rows."""
    if run.get("rows") != rows:
        yield f"it has {rows:,} rows, and its footer says {run.get('rows')}"
    if isinstance(run.get("input_rows"), int) and run["input_rows"] - (run.get("rows_skipped") or 0) != distinct:
        yield f"it has results of {distinct:,} input rows, and there were {run['input_rows']:,}"
    if isinstance(run.get("row_shapes"), str) and len(RowShapes.decode(run["row_shapes"])) != distinct:
        yield "its footer describes another number of input rows"


def _states(path: Path, run: Mapping[str, Any] | None) -> Finding:
    """Check hidden states: every byte, their keys in order, the size of each, and that they are those of a run."""
    finding = Finding(path)
    try:
        own = read_footer(path, STATES_CONTENTS)
        if own is None:
            finding.problems.append("the hidden states are missing")
            return finding
        with open_parquet(path) as table:
            table.check()
            finding.rows = len(table)
            finding.problems += _broken_states(table)
    except DamagedFile as problem:
        finding.problems.append(f"damaged ({problem.reason})")
        return finding
    expected = own if run is None else {**run, "rows": run["states"]}
    same = all(own.get(name) == expected.get(name) for name in ("fingerprint", "shard", "rows"))
    if not same or own["rows"] != finding.rows:
        finding.problems.append("they are not the hidden states of the output")
    return finding


def _broken_states(table: StoredTable) -> Iterator[str]:
    last: tuple[int, ...] = (-1,) * len(_STATE_KEYS)
    for group in table.groups():
        keys = [last, *zip(*(group[name].to_pylist() for name in _STATE_KEYS), strict=True)]
        if any(one >= two for one, two in pairwise(keys)):
            yield "its records are not in order"
        last = keys[-1]
        sizes = [int(np.prod(shape)) for shape in group["shape"].to_pylist()]
        if sizes != pc.list_value_length(group["values"]).to_pylist():
            yield "a record has another number of values than its shape"


def _lines(path: Path) -> Iterator[Finding]:
    """Check an output of JSON lines and its file of errors, as far as lines can tell: they have no checksums."""
    jobs: set[Any] = set()
    seen: set[int] = set()
    states = None
    for file in line_files(path):
        finding = Finding(file, notes=["JSON lines have no checksums"])
        last = (-1, 0, 0)
        with open_named(file) as stream:
            for number, line in enumerate(stream, 1):
                key, failed, mark = _line_key(line)
                if key is None or mark is None:
                    finding.problems.append(f"line {number} is not a whole line of batchgen's")
                    break
                jobs.add(mark["job"])
                states = mark.get("states", states)
                if key <= last or (key[0] != last[0] and key[0] in seen):
                    finding.problems.append(f"line {number} is not in order, or is there twice")
                finding.rows, finding.errors, last = finding.rows + 1, finding.errors + failed, key
                seen.add(key[0])
        if len(jobs) > 1:
            finding.problems.append("its lines are of several jobs")
        yield finding
    if states:
        finding = _states(output_paths(path).states, None)
        if not finding.problems and finding.rows != states:
            finding.problems.append("they are not the hidden states of the output")
        yield finding


def _line_key(line: bytes) -> tuple[tuple[int, int, int] | None, bool, Mapping[str, Any] | None]:
    """(key, whether it failed, mark of its job) of a line; None for what it does not have."""
    mark = line_mark(line) if line.endswith(b"\n") else None
    if mark is None:
        return None, False, None
    value = read_json(line)
    if (batch_id := _BATCH_ID.fullmatch(str(value.get("id")))) is not None and "custom_id" in value:
        response = value.get("response")
        body = response.get("body") if isinstance(response, dict) else None
        return ((int(batch_id[1], 16), 0, 0), "error" in body, mark) if isinstance(body, dict) else (None, False, mark)
    key = tuple(value.get(name) for name in KEY_COLUMNS)
    whole = all(isinstance(number, int) for number in key) and (value.get("status") == "error") == ("error" in value)
    return (key if whole else None), "error" in value, mark


def _work(folder: Path) -> Iterator[Finding]:
    """Check a work folder: run.json, and each part with its hidden states."""
    state = Finding(folder / STATE_NAME)
    if (reason := state_damage(folder)) is not None:
        state.problems.append(f"damaged ({reason})")
        yield state
    record = read_state(folder)
    job = None if record is None else str(record["fingerprint"])
    keys = {}
    for part in part_files(folder):
        finding = Finding(part)
        try:
            keys[part] = checked_keys(part, job, whole=True)
            finding.rows, finding.errors = len(keys[part][0]), int(keys[part][3].sum())
            if part in doubled_parts(keys):
                finding.problems.append("another part holds a row of it as well")
        except DamagedFile as problem:
            finding.problems.append(f"{problem.path.name} is damaged ({problem.reason})")
        yield finding


def verify_files(out: Path) -> bool:
    """Check the files of an output and print what was found, a line for each. Returns whether all are intact.

    Raises:
        InputError: there is nothing to check, or a file cannot be read.
    """
    intact = True
    with read_errors(out):
        for finding in check_files(out):
            print(printable(finding.text()))
            intact &= not finding.problems
    return intact
