"""What a job and its replicas, which are processes, tell one another; pickled, through pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.config.run_config import RunConfig
from batchgen.engine.loop import LoopState
from batchgen.errors import ErrorInfo
from batchgen.job.display.progress import TimeLeft
from batchgen.job.summary import RunCounts
from batchgen.request.completion import Completion, StreamEvent


@dataclass(frozen=True, slots=True)
class Load:
    """To a replica: load the model."""

    config: RunConfig
    """The job's, with the replica's threads and memory."""
    record: Path | None
    """File for what it has in work; None: a temporary one."""
    key: str
    """Of the job."""


@dataclass(frozen=True, slots=True)
class Read:
    """To a replica: read the rows of the job, tokenized if the folder has them, else from the input."""

    folder: Path
    key: str
    scaled: bool
    """As `Engine.start` takes it."""
    events: bool
    """Whether events are wanted."""
    times: bool
    """Whether the time left is."""
    refused: Mapping[int, ErrorInfo]
    """Row -> its error, for rows that are not read."""
    clock: str
    """The time that conversations see."""


@dataclass(frozen=True, slots=True)
class Share:
    """To a replica: generate these requests."""

    requests: npt.NDArray[np.int64]
    set_aside: Mapping[int, ErrorInfo]
    """Row -> its error, for rows that do not generate."""
    alone: int | None = None
    """The row that they are of, if it runs alone since others died of it."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """To a replica: give back a part of what has not begun."""

    share: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """From a replica: the model is loaded."""


@dataclass(frozen=True, slots=True)
class Step:
    """From a replica: what the last steps made."""

    groups: Sequence[list[Completion]]
    events: Sequence[StreamEvent]
    state: LoopState
    left: TimeLeft | None
    unbegun: int
    """Number of samples that have not begun."""


@dataclass(frozen=True, slots=True)
class Given:
    """From a replica: the requests that it gives back."""

    requests: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ended:
    """From a replica: its share is generated."""

    counts: RunCounts
    facts: Mapping[str, Any]
    notes: Sequence[str]
    slowest: Sequence[tuple[float, int]]
    """Seconds that a sample took, and its row."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a replica: why it ends."""

    error: Exception
    text: str
    """The traceback of an internal error; empty for others."""
