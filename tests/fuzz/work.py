"""Fuzzer of work folders: what happens to the files of an interrupted job before it is run again.

An input is a list of changes. The job run again gives the results of one that was not disturbed, or refuses with a
documented exit code and leaves every intact part where it was, or set aside.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq

from tests.e2e.runner import parts_of
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.jobs import command, interrupted, model_folder, scratch
from tests.fuzz.mutations import TEXTS, any_value, dump, load
from tests.fuzz.parsing import require

_ROWS = 48
_IGNORED = ("cached_tokens",)
"""Columns that say how a row was computed."""
_OPERATIONS = ("flip", "cut", "remove", "swap", "copy", "empty", "write", "grow", "add", "folder")
_NAMES = (
    "x",
    "part-00000.parquet",
    "parts/part-00099.parquet",
    "lock",
    "run.json",
    "tokenized/tokens",
    "run.json.tmp",
    "parts/x.tmp",
    "states/x",
)
_WORDS = ["run", "in.jsonl", "-o", "out.parquet"]


def _lines() -> str:
    rows: list[dict[str, Any]] = []
    for number in range(_ROWS):
        row: dict[str, Any] = {
            "id": f"r{number}",
            "text": f"Text {number}",
            "max_new_tokens": 3 + number % 3,
            "note": number,
        }
        row |= ({"n": 2}, {"temperature": 0}, {"return_logprob": True}, {"temperature": -1}, {})[number % 5]
        rows.append(row)
    return "".join(json.dumps(row) + "\n" for row in rows)


@cache
def _interrupted() -> tuple[Path, dict[str, list[Any]], tuple[str, ...]]:
    """A folder with an interrupted job, the results of an undisturbed one, and the files of its work folder."""
    folder = scratch() / "interrupted"
    folder.mkdir()
    (folder / "in.jsonl").write_text(_lines())
    words = [*_WORDS, "--model", model_folder()]
    interrupted([*words, "--commit-every", "5", "--max-num-seqs", "4"], folder, 44)
    require(len(parts_of(folder / "out.parquet")) > 1, "the prepared job has parts:", parts_of(folder / "out.parquet"))
    whole = Path(tempfile.mkdtemp(dir=scratch()))
    shutil.copy(folder / "in.jsonl", whole)
    require(command(words, whole).code == 0, "the prepared job is done")
    work = folder / "out.parquet.work"
    names = tuple(sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()))
    return folder, _table(whole / "out.parquet"), names


def _table(path: Path) -> dict[str, list[Any]]:
    table = pq.read_table(path)
    return {name: table[name].to_pylist() for name in table.column_names if name not in _IGNORED}


def _apply(change: Sequence[Any], work: Path, names: tuple[str, ...]) -> None:
    """Do one change; one that makes no sense, or that an earlier one made impossible, is left out."""
    kind, first, second, text = change
    path, other = (work / names[number % len(names)] for number in (first, second))
    if kind in ("add", "folder"):
        path = work / _NAMES[first % len(_NAMES)]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if kind == "folder" else path.write_text(text)
        return
    if not path.is_file():
        return
    content = bytearray(path.read_bytes())
    match kind:
        case "flip" if content:
            content[second % len(content)] ^= 1 << second % 8
            path.write_bytes(content)
        case "cut" if content:
            path.write_bytes(content[: second % len(content)])
        case "remove":
            path.unlink()
        case "swap" if other.is_file():
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        case "copy":
            if other.parent.is_dir():
                other.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "write":
            path.write_text(text)
        case "grow":
            path.write_bytes(content + text.encode() * (1 + second % 3))


def _changes(data: bytes) -> list[tuple[str, int, int, str]] | None:
    try:
        found = load(data)
        made = [(str(kind), int(first), int(second), str(text)) for kind, first, second, text in found]
        [text.encode() for *_, text in made]
    except (ValueError, TypeError, OverflowError):
        return None
    good = all(
        kind in _OPERATIONS and 0 <= first < 1 << 40 and 0 <= second < 1 << 40 for kind, first, second, _ in made
    )
    return made if good and len(made) <= 8 else None


def _parts(work: Path) -> set[str]:
    """Digests of all files that are, or were, parts."""
    files = [path for path in work.rglob("*") if path.is_file()] if work.is_dir() else []
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files if "part-" in path.name}


def _check(data: bytes) -> Hashable:
    changes = _changes(data)
    if changes is None:
        return None
    base, expected, names = _interrupted()
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        work = folder / "out.parquet.work"
        intact = _parts(work)
        for change in changes:
            _apply(change, work, names)
        before = _parts(work) & intact
        done = command([*_WORDS, "--model", model_folder()], folder)
        if done.code == 0:
            found = _table(folder / "out.parquet")
            differing = [name for name in expected if found.get(name) != expected[name]]
            require(not differing and found.keys() == expected.keys(), "the results are those of one run:", differing)
            return "done"
        require(not (folder / "out.parquet").exists(), "a refused job leaves the output alone:", done.stderr)
        kept = _parts(folder)
        require(before <= kept, "a refused job loses no part:", done.stderr)
        last = done.stderr.strip().splitlines()[-1:]
        return done.code, last[0][-40:] if last else ""
    finally:
        shutil.rmtree(folder)


def _make(rng: Random) -> bytes:
    return dump([_change(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))])


def _change(rng: Random) -> list[Any]:
    text = rng.choice([text for text in TEXTS if text.isascii()] + [json.dumps(any_value(rng)) for _ in range(9)])
    return [rng.choice(_OPERATIONS), rng.randrange(40), rng.randrange(1 << 20), text]


def _mutate(data: bytes, rng: Random) -> bytes:
    changes: list[Any] = [list(change) for change in _changes(data) or []]
    if not changes or rng.random() < 0.3:
        return _make(rng)
    changes[rng.randrange(len(changes))][rng.choice((1, 2))] = rng.randrange(1 << 20)
    if rng.random() < 0.3:
        changes.append(_change(rng))
    return dump(changes[:8])


FUZZERS = (Fuzzer("work", _check, _make, _mutate),)
