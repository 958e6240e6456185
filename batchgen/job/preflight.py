"""Checks of the model folder, the inputs and the output files, made before torch is imported (which takes seconds).

What they find (the checked folder, the input files, the imported processors) is passed on: nothing is checked twice.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchgen.config.engine_config import EngineConfig
from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN
from batchgen.data.carry import Carry, effective_carry
from batchgen.data.files import followed, resolved, status_of, system
from batchgen.data.read.input_files import FoundInput, find_inputs
from batchgen.data.read.selection import Selection
from batchgen.data.reserved_paths import ReservedPaths, refuse_other_file
from batchgen.demo import named_model
from batchgen.errors import OutputError, UsageError
from batchgen.job.signals import StopRequest
from batchgen.models.check import CheckedModel, check_model
from batchgen.models.checkpoint.file_hashes import FileHashes
from batchgen.models.checkpoint.overrides import Overrides
from batchgen.request.printable import format_size
from batchgen.request.processors import LoadedProcessor, load_processors

DEMO = "demonstration model"
"""What the record of a job calls the packaged model."""
_NOTED_AFTER = 1.0
"""Seconds of waiting for the digests of the weights after which a line says so."""


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that passed the checks, and what they found."""

    config: RunConfig
    model: CheckedModel
    inputs: tuple[FoundInput, ...]
    processors: Mapping[str, LoadedProcessor]
    """Custom logit processors by name."""
    hashes: FileHashes
    """Digests of all weights, which are hashed from the checks on."""


def preflight(config: RunConfig) -> CheckedJob:
    """Check the model folder and adapters, the inputs and the output files, and import logit processors.

    Raises:
        ModelError: the model cannot be used.
        InputError: an input is missing, unreadable or of an unknown format.
        UsageError: an input is part of the job's output, events or the report would replace another file of the job, or
            a logit processor cannot be imported.
        OutputError: the report cannot be written.
    """
    _check_columns(config)
    model = check_engine_model(config.engine)
    hashes = model.hashes()
    inputs = tuple(find_inputs(config.inputs, reserved_paths(config), config.input_format))
    check_output_targets(config, inputs)
    # Last: a processor may import torch.
    return CheckedJob(config, model, inputs, load_processors(config.engine.logit_processor), hashes)


def check_engine_model(engine: EngineConfig) -> CheckedModel:
    """Check the model folder and the adapters of a job; without a model, the demonstration model.

    Raises:
        ModelError: the model cannot be used.
    """
    return check_model(
        named_model(engine.model),
        implementation=engine.model_impl,
        max_model_len=engine.max_model_len,
        revision=engine.revision,
        lora=engine.lora,
        overrides=Overrides(engine.hf_overrides, engine.rope_scaling),
        pickles=engine.allow_pickle_weights,
    )


def reserved_paths(config: RunConfig) -> ReservedPaths:
    """Reserved paths of the job with this configuration."""
    written = [path for path in (config.events, config.report) if path not in (None, STDIN)]
    shards = None if config.shard is None else config.shard.count
    return ReservedPaths(config.output, shards, [*map(str, written)], config.work_path)


def check_output_targets(config: RunConfig, inputs: Iterable[FoundInput]) -> None:
    """Check that `--events` and `--report` name no other file of the job, and that the report can be written.

    Pipes and devices are not checked.

    Args:
        config: the configuration of the job.
        inputs: its input files.

    Raises:
        UsageError: one of them is an input, part of the output, or the same file as the other.
        OutputError: the report cannot be written.
    """
    reserved = reserved_paths(config)
    options_by_path: dict[Path, str] = {}
    for option, target in (("--events", config.events), ("--report", config.report)):
        if target in (None, STDIN) or _is_special(Path(str(target))):
            continue
        path = resolved(Path(str(target)))
        if reserved.is_result(str(path)):
            raise UsageError(f"`{option}` {target} is part of the job's output; give another name")
        if path in options_by_path:
            raise UsageError(f"`{option}` {target} is the same file as `{options_by_path[path]}`; give another name")
        if _is_input(Path(str(target)), inputs):
            raise UsageError(
                f"`{option}` {target} is an input of the job; give another name, which no input pattern matches"
            )
        options_by_path[path] = option
        refuse_other_file(option, str(target), config.existing == "overwrite")
    if config.report not in (None, STDIN):
        _check_writable(followed(Path(str(config.report))))


def selection_of(config: RunConfig) -> Selection:
    """The rows of the input that the options select."""
    return Selection(
        offset=config.offset,
        limit=config.limit,
        sample=config.sample,
        sample_seed=config.engine.seed,
        shard=(config.shard.index, config.shard.count) if config.shard else None,
    )


def carry_of(config: RunConfig) -> Carry:
    """The fields that are carried to the output, as the options name them."""
    return effective_carry(config.carry, config.columns or (), include_source=config.include_source)


def _check_columns(config: RunConfig) -> None:
    """Refuse `--columns` with which a column would be empty, or the output of no use.

    Raises:
        UsageError: the message names the remedy.
    """
    columns = config.columns or ()
    for name in {"prompt", "prompt_ids"}.intersection(columns):
        if not getattr(config, f"include_{name}"):
            raise UsageError(
                f"`--columns` {name}: the column is written with --include-{name.replace('_', '-')}; add it"
            )
    if columns and config.shard is not None:
        raise UsageError("`--columns` with --shard: shards are merged by their other columns; leave out --columns")


def wait_for_hashes(hashes: FileHashes, note: Callable[[str], None], stop: StopRequest | None = None) -> None:
    """Wait until all weights are hashed; `note` is called with a line if that takes long.

    Raises:
        Interrupted: `stop` requests a stop.
    """
    began, noted = time.monotonic(), False
    while not wait([hashes.done], timeout=0.1).done:
        if stop is not None and stop.requested:
            raise stop.error_at_start()
        if not noted and time.monotonic() - began > _NOTED_AFTER:
            note(f"hashing {format_size(hashes.size)} of weights, to tell them from others when the job is run again")
            noted = True


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return status_of(path)
    return None


def _is_special(path: Path) -> bool:
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)


def _is_input(path: Path, inputs: Iterable[FoundInput]) -> bool:
    """Whether the job reads this file: under this name, another name, or as standard input."""
    status = _status(path)
    if status is None:
        return False
    for file in inputs:
        with suppress(OSError):
            if os.path.samestat(status, system.fstat(0) if file.path == STDIN else system.stat(Path(file.path))):
                return True
    return False


def _check_writable(path: Path) -> None:
    """Check, without creating the file, that the report can be written.

    Raises:
        OutputError: it cannot be written.
    """
    status = _status(path)
    number = 0
    if status is not None and stat.S_ISDIR(status.st_mode):
        number = errno.EISDIR
    elif status is None and not system.access(path.parent, os.F_OK):
        number = errno.ENOENT
    elif not system.access(path if _is_special(path) else path.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise OutputError(f"cannot write the report {path}: {os.strerror(number)}")
