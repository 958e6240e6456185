"""What the jobs of an engine share, and the settings of one job's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen.engine.media.job import JobMedia
from batchgen.engine.memory.d2h_queue import QUEUE_BYTES
from batchgen.engine.observer import StepObserver
from batchgen.engine.parallel.peers import NO_PEERS, Peers
from batchgen.engine.sampling.logits_processor import RepetitionScope
from batchgen.engine.step.logprobs import LogprobsMode
from batchgen.errors import ErrorInfo
from batchgen.kernels.backend import Backend
from batchgen.kernels.device import Device
from batchgen.models.base import Model
from batchgen.models.embed.heads import TaskHeads
from batchgen.models.media.encoder import MediaEncoder
from batchgen.request.processors import LoadedProcessor
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.reasoning import ReasoningParser
from batchgen.text.tokens.tokenizer import Tokenizer


class WorkRecord(StepObserver):
    """Learns which samples run, and knows which rows ended earlier runs. Rows are given by their index."""

    set_aside: Mapping[int, ErrorInfo]
    """Row -> its error, for rows that do not generate any more"""
    alone: Sequence[int]
    """Rows that generate by themselves when all others are done"""

    def run_alone(self, row: int) -> None:
        """The next samples are those of one of the rows in `alone`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineResources:
    """The loaded model with everything that runs it and reads its tokens."""

    model: Model
    backend: Backend
    device: Device
    tokenizer: Tokenizer
    grammars: Grammars
    """Compiled constraints"""
    processors: Mapping[str, LoadedProcessor]
    """Custom logit processors by name"""
    reasoning: ReasoningParser | None = None
    """The model's format of thoughts; None if it has none that is known"""
    heads: TaskHeads | None = None
    """What makes embeddings and scores of states; None: no row has any"""
    towers: MediaEncoder | None = None
    """What reads the job's images and sounds; None: no row has any"""
    media: JobMedia | None = None
    """The job's images and sounds; None: no row has any, or rank 0 reads them"""
    peers: Peers = NO_PEERS
    """The engines of other ranks"""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Options of a job that its loop needs."""

    prompt_ids: bool = True
    """Whether completions contain their prompt's ids"""
    repeat_span: int | None = None
    """As for `sequence.is_repeating`; None: repetition does not end a sample"""
    logprobs_mode: LogprobsMode = "raw"
    repetition_scope: RepetitionScope = "output"
    """Whether repetition penalties include prompt tokens"""
    exact_states: bool = False
    """Whether hidden states are returned in float32 instead of the model's dtype"""
    queue_bytes: int = QUEUE_BYTES
    """Most bytes of hidden states and prompt logprobs that are being copied to the host"""
    record: WorkRecord | None = None
    """Receives which samples are running; None: no record is kept"""
