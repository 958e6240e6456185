"""Every operation of a small job on its files is made to fail, ends the process, or is the last before a power loss.

Then the same command runs again: its files are those of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.faults.disk import Recorder, Tree, tree_of, write_tree
from tests.faults.jobs import JOBS, STREAMED, FaultJob, results_of, run_killed, run_short_of_memory, run_with
from tests.faults.layer import Fail, Layer, ShortWrite, SillyRename

ONCE = [errno.EIO, errno.EINTR, errno.ESTALE]
"""Errors of one operation."""
LASTING = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO]
"""Errors of all operations of their kind, from one on until the end of the run."""
SAMPLED = 3
"""Places of each kind of fault in the quick form."""

ENDS = {0, 4, 5}
"""Exit codes of a run whose files fail: done after all, input unreadable, output cannot be written."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run that nothing disturbed."""

    job: FaultJob
    model: Path
    run: Recorder
    results: dict[str, Any]

    def check_rerun(self, folder: Path, what: str) -> None:
        """Run the job again in a folder, and check that its files are as they must be."""
        done = run_with(None, self.job, folder, self.model, expect=None)
        assert done.code == 0, f"{what}: exit {done.code}\n{done.stderr}"
        found = results_of(tree_of(folder), folder)
        assert found.keys() == self.results.keys(), what
        for path, content in found.items():
            assert content == self.results[path], f"{what}: {path} differs"


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: job.name)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    job: FaultJob = request.param
    folder = tmp_path_factory.mktemp("undisturbed")
    model = tmp_path_factory.mktemp("model") / "model"
    job.save_model(model)
    job.write_input(folder)
    recorder = Recorder(folder)
    run_with(recorder, job, folder, model)
    *_, (_, disk) = recorder.disks()
    assert disk.after_kill() == tree_of(folder), "the recorded changes are those that happened"
    return Undisturbed(job, model, recorder, results_of(tree_of(folder), folder))


def fresh_folders(tmp_path: Path) -> Iterator[Path]:
    """Empty folders, each removed when the next one is asked for."""
    for number in itertools.count():
        yield tmp_path / str(number)
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)


def states_left(recorder: Recorder, losses: int, rng: Random) -> Iterator[tuple[str, Tree]]:
    """(what happened, the files that it left) for each operation of a run, each state once.

    Args:
        recorder: the run.
        losses: number of power losses, with random parts of what was not synced, for each operation.
        rng: draws them.
    """
    seen = set()
    for at, disk in recorder.disks():
        place = recorder.operations[at] if at < len(recorder.operations) else "the end"
        trees = [("killed", disk.after_kill()), ("power lost", disk.after_loss())]
        trees += [("power lost, a part kept", disk.after_loss(lambda: rng.random() < 0.5)) for _ in range(losses)]
        for what, tree in trees:
            key = tuple(sorted(tree.items()))
            if key not in seen:
                seen.add(key)
                yield f"{what} before operation {at}, {place}", tree


def check_states(undisturbed: Undisturbed, tmp_path: Path, losses: int, sample: int | None) -> int:
    rng = Random(31)
    states = list(states_left(undisturbed.run, losses, rng))
    folders = fresh_folders(tmp_path)
    for what, tree in states if sample is None else rng.sample(states, sample):
        folder = next(folders)
        write_tree(folder, tree)
        undisturbed.check_rerun(folder, what)
    return len(states)


def check_failure(
    undisturbed: Undisturbed, folder: Path, layer: Layer, what: str, seen: set[Any] | None = None
) -> bool:
    """Run a job with a fault, then again without; whether the first run failed.

    With `seen`, the states of files that runs left so far, the second run is left out after one of these.
    """
    undisturbed.job.write_input(folder)
    done = run_with(layer, undisturbed.job, folder, undisturbed.model, expect=None)
    assert done.code in ENDS, f"{what}: exit {done.code}\n{done.stderr}"
    assert "internal error" not in done.stderr, what
    assert "Traceback" not in done.stderr, what
    state = tuple(sorted((path, _lasting(path, content)) for path, content in tree_of(folder).items()))
    if seen is None or state not in seen:
        undisturbed.check_rerun(folder, what)
    if seen is not None:
        seen.add(state)
    return done.code != 0


def _lasting(path: str, content: bytes | None) -> object:
    """What equal states of a file have in common: the lock, the report and a zip archive also hold times."""
    timed = path.endswith(("lock", "report.json", "columns.npz", "columns.npz.tmp"))
    return len(content) if timed and content is not None else content


def failures(undisturbed: Undisturbed, folder: Path, number: int) -> Iterator[tuple[str, Layer]]:
    """Each kind of error at one operation."""
    for code in ONCE:
        yield f"{errno.errorcode[code]} at operation {number}", Fail(folder, number, code)
    for code in LASTING:
        yield f"{errno.errorcode[code]} from operation {number}", Fail(folder, number, code, from_then_on=True)


def test_a_killed_run_or_a_power_loss_loses_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    check_states(undisturbed, tmp_path, losses=1, sample=SAMPLED)


def test_a_failing_operation_loses_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    rng = Random(31)
    folders = fresh_folders(tmp_path)
    for _ in range(SAMPLED):
        folder = next(folders)
        what, layer = rng.choice([*failures(undisturbed, folder, rng.randrange(len(undisturbed.run.operations)))])
        check_failure(undisturbed, folder, layer, what)


def test_short_writes_change_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    undisturbed.job.write_input(tmp_path)
    run_with(ShortWrite(tmp_path, 0), undisturbed.job, tmp_path, undisturbed.model)
    assert results_of(tree_of(tmp_path), tmp_path) == undisturbed.results


@pytest.mark.slow
def test_every_state_that_a_kill_or_a_power_loss_leaves(undisturbed: Undisturbed, tmp_path: Path) -> None:
    print(undisturbed.job.name, "states:", check_states(undisturbed, tmp_path, losses=2, sample=None))


@pytest.mark.slow
def test_every_operation_fails_with_every_error(undisturbed: Undisturbed, tmp_path: Path) -> None:
    folders = fresh_folders(tmp_path)
    tried = failed = 0
    seen: set[Any] = set()
    for number in range(len(undisturbed.run.operations)):
        for kind in range(len(ONCE) + len(LASTING)):
            folder = next(folders)
            what, layer = [*failures(undisturbed, folder, number)][kind]
            failed += check_failure(undisturbed, folder, layer, what, seen)
            tried += 1
    print(undisturbed.job.name, "faults:", tried, "runs that failed:", failed, "states left:", len(seen))


@pytest.mark.slow
def test_real_kills(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """As the recorded ones: `kill -9` of another process at every fifth operation."""
    folders = fresh_folders(tmp_path)
    for number in range(0, len(undisturbed.run.operations), 5):
        folder = next(folders)
        undisturbed.job.write_input(folder)
        run_killed(undisturbed.job, folder, undisturbed.model, number)
        undisturbed.check_rerun(folder, f"killed at operation {number}")


@pytest.mark.slow
def test_failing_allocations_lose_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Wherever they fail, also so that the process dies of it."""
    pytest.importorskip("_testcapi")
    rng, folders = Random(31), fresh_folders(tmp_path)
    for _ in range(30):
        folder, first = next(folders), int(10 ** rng.uniform(3, 6.5))
        undisturbed.job.write_input(folder)
        code = run_short_of_memory(undisturbed.job, folder, undisturbed.model, first)
        undisturbed.check_rerun(folder, f"allocations {first} to {first + 9} failed, exit {code}")


@pytest.mark.slow
def test_a_second_power_loss(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """During the run that goes on after a first one."""
    rng, folders = Random(31), fresh_folders(tmp_path)
    for what, tree in rng.sample([*states_left(undisturbed.run, 1, rng)], 10):
        folder = next(folders)
        write_tree(folder, tree)
        recorder = Recorder(folder)
        run_with(recorder, undisturbed.job, folder, undisturbed.model)
        again = [*states_left(recorder, 1, rng)]
        for then, left in rng.sample(again, min(8, len(again))):
            folder = next(folders)
            write_tree(folder, left)
            undisturbed.check_rerun(folder, f"{what}; then {then}")


def test_files_that_are_removed_while_they_are_open(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """As on NFS: such a file stays in its folder, under another name, until it is closed."""
    undisturbed.job.write_input(tmp_path)
    layer = SillyRename(tmp_path)
    run_with(layer, undisturbed.job, tmp_path, undisturbed.model)
    assert layer.renamed, "some are"
    assert results_of(tree_of(tmp_path), tmp_path) == undisturbed.results


def test_what_was_committed_survives_a_power_loss(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Each part whose commit had ended, with its hidden states and events; at the end the whole output."""
    work = "out.work/part-00000-of-00002" if undisturbed.job.name == "shard" else f"{undisturbed.job.words[1]}.work"
    committed: set[str] = set()
    renamed: set[str] = set()
    checked = 0
    tree: Tree = {}
    for at, disk in undisturbed.run.disks():
        tree = disk.after_loss()
        assert committed <= tree.keys(), f"lost before operation {at}"
        if len(committed) > checked:
            _check_events(tree, [content for path, content in tree.items() if path in committed])
        checked = len(committed)
        name, _, path = (undisturbed.run.operations[at] if at < len(undisturbed.run.operations) else " ").partition(" ")
        if name == "rename" and path.startswith((f"{work}/parts/part-", f"{work}/states/part-")):
            renamed.add(path.removesuffix(".tmp"))
        elif name == "unlink":
            committed.discard(path)
        elif name == "sync_folder" and path == f"{work}/parts":
            committed |= renamed
    assert committed == set(), "removed in the end"
    write_tree(tmp_path, tree)
    found = results_of(tree, tmp_path)
    for path, content in undisturbed.results.items():
        assert found[path] == content, f"{path} after a power loss at the end"


def _check_events(tree: Tree, parts: list[bytes | None]) -> None:
    """Check that the events of all rows of committed parts are on disk."""
    ended = {
        (event["row_index"], event["prompt_index"], event["sample_index"])
        for event in map(json.loads, (tree.get("events.jsonl") or b"").splitlines())
        if event["event"] == "finish"
    }
    for content in parts:
        if content is not None and content[:4] == b"PAR1":
            for row in pq.read_table(io.BytesIO(content)).to_pylist():
                if row["status"] == "ok" and row["id"] in STREAMED:
                    assert (row["row_index"], row["prompt_index"], row["sample_index"]) in ended
