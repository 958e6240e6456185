"""The draws of a step that was run in parts, as those of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.sampler import Sampled
from batchgen.errors import ErrorCode, ErrorInfo

__all__ = ["Drawn", "FailedDraws", "JoinedDraws", "out_of_memory"]


class Drawn(Protocol):
    """What a step draws."""

    @property
    def tokens(self) -> Tensor:
        """[R] int64 on the device, perhaps not computed yet."""
        ...

    def read(self) -> Sampled:
        """The draws, once they are on the host."""
        ...


@dataclass(frozen=True, slots=True)
class FailedDraws:
    """Rows that got nothing: each ends in an error."""

    tokens: Tensor
    """[R] int64 that mean nothing"""
    error: ErrorInfo

    @staticmethod
    def out_of_memory(rows: int, device: torch.device, problem: str) -> FailedDraws:
        """Rows that fit into no memory; `problem`: what the device said."""
        return FailedDraws(torch.zeros(rows, dtype=torch.int64, device=device), out_of_memory(problem))

    def read(self) -> Sampled:
        """An error for each row."""
        return Sampled(np.zeros(len(self.tokens), np.int64), dict.fromkeys(range(len(self.tokens)), self.error))


@dataclass(frozen=True, slots=True)
class JoinedDraws:
    """Draws of parts that follow one another."""

    parts: Seq[Drawn]
    tokens: Tensor
    """[R] int64, all of them"""

    @staticmethod
    def of(parts: Seq[Drawn]) -> JoinedDraws:
        """At least one."""
        return JoinedDraws(parts, torch.cat([part.tokens for part in parts]))

    def read(self) -> Sampled:
        """All rows, numbered through."""
        joined = Sampled(np.zeros(0, np.int64))
        for part in self.parts:
            sampled, at = part.read(), len(joined.tokens)
            joined = Sampled(
                np.concatenate([joined.tokens, sampled.tokens]),
                joined.errors | {at + row: error for row, error in sampled.errors.items()},
                (*joined.logprobs, *(found.shifted(at) for found in sampled.logprobs)),
                joined.exhausted.union(at + row for row in sampled.exhausted),
            )
        return joined


def out_of_memory(problem: str) -> ErrorInfo:
    """What the output says of a row that fits into no memory."""
    return ErrorInfo(
        ErrorCode.OOM,
        f"memory ran out for this row even alone ({problem}); lower --kv-memory, --max-num-seqs or "
        "--max-tokens-per-step, or shorten the row",
    )
