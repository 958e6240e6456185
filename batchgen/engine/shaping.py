"""Shaping of logits between the model and the filters: what rows ask for, in the contract's order.

repetition → frequency, presence → logit_bias → custom processors → bad and allowed tokens

`Shape` is what one set of parameters asks for, made once however many rows share it; `Shaping` is one sample's, whose
own tokens are counted on the device; `Shaper` applies those of a step's rows. Rows that ask for nothing have none.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.counts import PenalisedRows, TokenCounts
from batchgen.engine.processors import OfferedRow, process
from batchgen.errors import ErrorInfo
from batchgen.kernels.device import Device
from batchgen.kernels.ops import Ops
from batchgen.params import SamplingParams
from batchgen.processors import LoadedProcessor
from batchgen.request import Request
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.words import bad_sequences

__all__ = ["RepetitionScope", "Shape", "Shaper", "Shapes", "Shaping"]

RepetitionScope = Literal["output", "prompt+output"]

Int64 = npt.NDArray[np.int64]

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What one set of parameters does to logits."""

    params: SamplingParams
    counts_prompt: bool
    """Whether the repetition penalty falls on the prompt's tokens, too."""
    bias_ids: Int64
    bias_values: npt.NDArray[np.float32]
    banned: Int64
    """Bad words of one token: never drawn."""
    phrases: Mapping[int, tuple[tuple[int, ...], ...]]
    """Longer bad words by their last token but one."""
    allowed: Int64 | None
    """The only ids that may be drawn, each once."""

    @staticmethod
    def of(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, scope: RepetitionScope) -> Shape:
        """Tokenise the bad words and lay everything out as arrays."""
        words = bad_sequences(params.bad_words, tokenizer, vocab_size) if params.bad_words else ()
        phrases: dict[int, tuple[tuple[int, ...], ...]] = {}
        for word in words:
            if len(word) > 1:
                phrases[word[-2]] = (*phrases.get(word[-2], ()), word)
        allowed = params.allowed_token_ids
        return Shape(
            params=params,
            counts_prompt=scope == "prompt+output" and params.repetition_penalty != 1.0,
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
            bias_values=np.array([bias for _, bias in params.logit_bias], np.float32),
            banned=np.array([word[0] for word in words if len(word) == 1], np.int64),
            phrases=phrases,
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int64)),
        )

    @property
    def alters(self) -> bool:
        """Whether tokens that can be drawn get other logits than the model's; a mask alone alters none of them."""
        return self.params.penalised or len(self.bias_ids) > 0 or self.params.custom_logit_processor is not None

    @property
    def masks(self) -> bool:
        """Whether tokens are masked, so that nothing may be left to draw."""
        return (
            bool(self.phrases)
            or len(self.banned) > 0
            or self.allowed is not None
            or self.params.custom_logit_processor is not None
        )


class Shapes:
    """The shapes of a job's parameter sets, made as rows come."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, scope: RepetitionScope, device: Device) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._scope: RepetitionScope = scope
        self._counts = TokenCounts(vocab_size, device)
        self._shapes: dict[int, Shape] = {}
        """By the identity of a parameter set, which its shape keeps alive: long lists of ids are not hashed again."""

    def start(self, request: Request, output_ids: list[int]) -> Shaping | None:
        """The shaping of a sample whose tokens will stand in `output_ids`; None where its row asks for nothing."""
        params = request.params
        if not params.shapes_logits or not request.max_new_tokens:
            return None
        shape = self._shapes.get(id(params))
        if shape is None:
            shape = Shape.of(params, self._tokenizer, self._vocab_size, self._scope)
            if not shape.alters and not shape.masks:
                return None  # nothing to keep: a constraint of each row's own is the grammar's
            self._shapes[id(params)] = shape
        return Shaping(shape, request, output_ids, self._counts)

    def finish(self, shaping: Shaping) -> None:
        """A sample ended: what is counted of it is forgotten."""
        if shaping.slot:
            self._counts.end(shaping.slot)
            shaping.slot = 0


class Shaping:
    """What one sample's own tokens make of its shape. They are counted when drawn: preemption forgets nothing."""

    __slots__ = ("counts", "offered", "output_ids", "shape", "slot")

    def __init__(self, shape: Shape, request: Request, output_ids: list[int], counts: TokenCounts) -> None:
        self.shape = shape
        self.output_ids = output_ids
        self.counts = counts
        self.slot = 0
        """Of `counts`; 0 where nothing is penalised."""
        if shape.params.penalised:
            self.slot = counts.begin(request.known_ids if shape.counts_prompt else None)
        named = shape.params.custom_logit_processor is not None
        self.offered = OfferedRow(request, output_ids) if named else None

    @property
    def needs_host(self) -> bool:
        """Whether what is done to its logits depends on its tokens so far, all of which only the host knows."""
        return self.offered is not None or bool(self.shape.phrases)

    def phrase_ends(self) -> Iterator[int]:
        """Tokens that would complete a bad word of several."""
        output = self.output_ids
        if output:
            for word in self.shape.phrases.get(output[-1], ()):
                if tuple(output[1 - len(word) :]) == word[:-1]:
                    yield word[-1]


class Shaper:
    """Shapes the logits of one set of rows, step after step; made anew when the rows change."""

    def __init__(
        self, rows: list[tuple[int, Shaping]], processors: Mapping[str, LoadedProcessor], device: Device, ops: Ops
    ) -> None:
        """`rows`: those of a step that ask for something, with their places. All of it goes up in one transfer."""
        self.places = [i for i, _ in rows]
        self._device = device
        self._ops = ops
        self._processors = processors
        self._phrased = [(i, s) for i, s in rows if s.shape.phrases]
        self._named: dict[str, list[tuple[int, OfferedRow]]] = {}
        for i, shaping in rows:
            if shaping.offered is not None:
                name = shaping.shape.params.custom_logit_processor or ""
                self._named.setdefault(name, []).append((i, shaping.offered))
        penalised = [(i, s) for i, s in rows if s.slot]
        arrays = _arrays(rows, penalised)
        at = dict(zip(arrays, device.upload(*arrays.values()), strict=True))
        self._bias = at["bias_rows"], at["bias_ids"], at["bias_values"]
        self._banned = at["banned_rows"], at["banned_ids"]
        self._only = at["only"]
        self._allowed = at["allowed_rows"], at["allowed_ids"]
        self._penalised: PenalisedRows | None = None
        if penalised:
            repetition, frequency, presence = (at[name] for name in _PENALTIES)
            slots = np.array([s.slot for _, s in penalised], np.int64)  # what was uploaded is not looked at again
            self._penalised = PenalisedRows(
                penalised[0][1].counts, slots, at["slots"], at["penalised"], (repetition, frequency, presence)
            )

    @property
    def processes(self) -> bool:
        """Whether a row names a processor."""
        return bool(self._named)

    @property
    def needs_host(self) -> bool:
        """Whether what is done to a row depends on its tokens so far, all of which only the host knows."""
        return bool(self._named or self._phrased)

    def __call__(self, logits: Tensor, failed: Container[int]) -> dict[int, ErrorInfo]:
        """Shape a step's logits in place.

        Args:
            logits: [R, V] float32.
            failed: rows that processors are not shown.

        Returns:
            Rows that a processor failed on, and why.
        """
        if self._penalised is not None:
            self._penalised.penalise(logits, self._ops)
        if len(self._bias[0]):
            self._ops.add_bias(logits, *self._bias)
        errors = self._process(logits, failed)
        self._mask(logits)
        return errors

    def count(self, tokens: Tensor) -> None:
        """Count the tokens [R] int64 that were drawn from the logits, once, for the penalties of the next."""
        if self._penalised is not None:
            self._penalised.count(tokens, self._ops)

    def _process(self, logits: Tensor, failed: Container[int]) -> dict[int, ErrorInfo]:
        errors: dict[int, ErrorInfo] = {}
        for name, rows in self._named.items():
            shown = [(i, row) for i, row in rows if i not in failed]
            if shown:
                index, offered = [i for i, _ in shown], [row for _, row in shown]
                errors |= process(self._device, self._processors[name].function, name, logits, index, offered)
        return errors

    def _mask(self, logits: Tensor) -> None:
        if len(self._banned[0]):
            self._ops.mask_tokens(logits, *self._banned)
        ends = [(i, token) for i, shaping in self._phrased for token in shaping.phrase_ends()]
        if ends:
            self._ops.mask_tokens(logits, *self._device.upload(*np.array(ends, np.int64).T.copy()))
        if len(self._only):
            self._ops.keep_only(logits, self._only, *self._allowed)


def _arrays(rows: list[tuple[int, Shaping]], penalised: list[tuple[int, Shaping]]) -> dict[str, npt.NDArray[Any]]:
    """What a set of rows tells the device, by name."""
    biased = [(i, s.shape) for i, s in rows if len(s.shape.bias_ids)]
    kept = [(i, s.shape.allowed) for i, s in rows if s.shape.allowed is not None]
    found: dict[str, npt.NDArray[Any]] = {}
    found["bias_rows"], found["bias_ids"] = _pairs([(i, shape.bias_ids) for i, shape in biased])
    found["bias_values"] = np.concatenate([np.zeros(0, np.float32), *(shape.bias_values for _, shape in biased)])
    found["banned_rows"], found["banned_ids"] = _pairs([(i, s.shape.banned) for i, s in rows if len(s.shape.banned)])
    found["allowed_rows"], found["allowed_ids"] = _pairs(kept)
    found["only"] = np.array([i for i, _ in kept], np.int64)
    found["penalised"] = np.array([i for i, _ in penalised], np.int64)
    found["slots"] = np.array([s.slot for _, s in penalised], np.int64)
    for name in _PENALTIES:
        found[name] = np.array([getattr(s.shape.params, name) for _, s in penalised], np.float32)
    return found


def _pairs(ids: list[tuple[int, Int64]]) -> tuple[Int64, Int64]:
    """(rows [m], ids [m]) of each row's ids."""
    rows = np.repeat(np.array([row for row, _ in ids], np.int64), [len(some) for _, some in ids])
    return rows, np.concatenate([np.zeros(0, np.int64), *(some for _, some in ids)])
