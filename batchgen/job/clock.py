"""The time that a job's conversations see, recorded so that all its runs and shards see one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from batchgen.config.urls import path_of
from batchgen.data.files import files_in, is_folder
from batchgen.data.results_file import intact_footer
from batchgen.data.store.work_folder import OutputPaths, RunIdentity, output_paths
from batchgen.data.store.work_owner import Policy
from batchgen.data.store.work_state import read_state
from batchgen.job.rows.fingerprint import JobIdentity
from batchgen.job.setup import Setup


def clock_record(setup: Setup) -> dict[str, Any]:
    """Entries of the footer: the time that the conversations saw, and what the chat template wrote of it."""
    tokenizer = setup.front_end.tokenizer
    shown = tokenizer.clock_text
    return {"clock": None if shown is None else tokenizer.clock.isoformat(), "clock_text": shown}


def set_clock(setup: Setup, identity: JobIdentity, paths: OutputPaths) -> str | None:
    """Set the time that the job's conversations see and return it; None if the model's chat template does not read it.

    It is the one given, the one with which the job began, that of the job whose rows are reused, or the time now.
    """
    config, tokenizer = setup.config, setup.front_end.tokenizer
    if tokenizer.clock_text is None:
        return None
    if config.engine.clock is None:
        clock = _recorded_clock(paths, identity.run, config.existing)
        if clock is None and config.existing != "overwrite":
            clock = _clock_of(paths.result)
        if clock is None and config.reuse is not None:
            clock = _clock_of(path_of(config.reuse))
        if clock is not None:
            tokenizer.clock = datetime.fromisoformat(clock)
    return tokenizer.clock.isoformat()


def _recorded_clock(paths: OutputPaths, identity: RunIdentity, policy: Policy = "resume") -> str | None:
    """Time that the conversations of this job see, as recorded by the work or output that a run would continue.

    Without any, that of another shard of the job, so that all its shards see one time. None if there is none.
    """
    old = read_state(paths.work)
    if policy == "overwrite" and (old is None or old["emptied_by"] != identity.key):
        old = None
    records = [old, None if policy == "overwrite" else _footer_of(paths.result, identity.fingerprint)]
    if identity.shard is not None:
        files = (file for file in files_in(paths.result.parent, "part-*.parquet") if file != paths.result)
        records += [_footer_of(file, identity.fingerprint) for file in files]
        folders = (folder for folder in files_in(paths.work.parent, "part-*") if folder != paths.work)
        states = filter(None, map(read_state, folders))
        records += [state for state in states if state["fingerprint"].startswith(identity.fingerprint)]
    return next((record["clock"] for record in records if record and record.get("clock")), None)


def _footer_of(file: Path, fingerprint: str) -> dict[str, Any] | None:
    footer = intact_footer(file)
    return footer if footer is not None and footer.get("fingerprint") == fingerprint else None


def _clock_of(out: Path) -> str | None:
    """The time that another job saw, from its finished output, a folder of shards or unfinished work."""
    first = next(iter(files_in(out, "part-*.parquet")), out) if is_folder(out) else out
    record = intact_footer(first) or read_state(out) or read_state(output_paths(out).work) or {}
    return record.get("clock")
