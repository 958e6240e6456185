"""The input files of a finished job, found again by what its output records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN
from batchgen.data.read.input_files import FoundInput, find_inputs
from batchgen.data.read.input_set import InputSet, open_inputs
from batchgen.errors import InputError
from batchgen.job.preflight import reserved_paths


def found_inputs(config: RunConfig, run: Mapping[str, Any], command: str) -> tuple[FoundInput, ...]:
    """The input files of the run, or those named instead. The recorded paths are used: a pattern may match others.

    Raises:
        InputError: a file is missing.
    """
    paths = config.inputs
    if tuple(paths) == tuple(run["configuration"]["inputs"]):
        paths = tuple(file["path"] for file in run["inputs"])
    if STDIN in paths:
        raise InputError(f"the run read standard input, which is not stored. {_remedy(command)}")
    return tuple(find_inputs(paths, reserved_paths(config), config.input_format))


def same_inputs(files: Sequence[FoundInput], run: Mapping[str, Any], command: str) -> InputSet:
    """The input files of the run, with unchanged content.

    Raises:
        InputError: a file is missing or has changed.
    """
    inputs, recorded = open_inputs(files), run["inputs"]
    if len(inputs.files) != len(recorded):
        raise InputError(f"the run had {len(recorded)} input files, not {len(inputs.files)}. {_remedy(command)}")
    for file, was in zip(inputs.files, recorded, strict=True):
        # A copy elsewhere has another kind of mark: of that only the size is compared.
        if any(was.get(name, value) != value for name, value in file.record().items() if name != "path"):
            raise InputError(f"{was['path']} has changed since the run (its content differs). {_remedy(command)}")
    return inputs


def _remedy(command: str) -> str:
    return f"Name the original files: batchgen {command} OUT INPUT..."
