"""Token-by-token events of the rows that ask for them (`stream`). Knows nothing of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from batchgen.engine.planning import Workload
from batchgen.engine.sequence import Sequence
from batchgen.request import Completion, Request, StreamEvent
from batchgen.text.surround import echoed
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Emit", "Streams"]

Emit = Callable[[Seq[StreamEvent]], None]
"""Takes what happened in a step, in order."""


@dataclass(slots=True)
class _Stream:
    sequence: Sequence
    sent: int = 0
    """Characters of the sample's text that events have said."""
    tokens: int = 0
    """Tokens that had their event."""
    begun: bool = False


class Streams:
    """The running samples of rows with `stream`. False while there are none.

    Of each sample comes an event for every token, in order, and one for its end. Their `text`s joined are the sample's
    text: a token's event says what no later token can change and no later stop can cut, the last event says the rest.
    Rows copied from an identical one have events of their own, at the same time.
    """

    def __init__(
        self, workload: Workload, tokenizer: Tokenizer, emit: Emit | None, last_logprob: Callable[[int], float]
    ) -> None:
        """`last_logprob`: of the latest token of a sequence whose row returns logprobs."""
        self._last_logprob = last_logprob
        self._workload = workload
        self._tokenizer = tokenizer
        self._emit = emit
        self._open: dict[int, _Stream] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def start(self, number: int, sequence: Sequence) -> None:
        """Sequence `number` begins; it is followed if its row asks for it and somebody listens."""
        if self._emit is not None and sequence.request.params.stream:
            self._open[number] = _Stream(sequence)

    def step(self, numbers: Iterable[int]) -> None:
        """Sequences `numbers` have just got a token, or failed."""
        events: list[StreamEvent] = []
        for number in numbers:
            stream = self._open.get(number)
            # A sample whose masks leave nothing to draw may end without another token.
            if stream is not None and stream.sequence.error is None and len(stream.sequence.output_ids) > stream.tokens:
                events += self._for_all(stream.sequence.request, self._token(number, stream))
        if events and self._emit is not None:
            self._emit(events)

    def _token(self, number: int, stream: _Stream) -> StreamEvent:
        sequence = stream.sequence
        request, ids = sequence.request, sequence.output_ids
        # What the token that ends a sample brings may be cut; the last event says what stays of it.
        text = sequence.stops.settled() if sequence.finish_reason is None else ""
        if not stream.begun and request.params.echo:
            text = echoed(request.prompt_ids.tolist(), self._tokenizer) + text
        stream.begun = True
        stream.tokens = len(ids)
        stream.sent += len(text)
        return StreamEvent(
            request.row_index,
            request.prompt_index,
            sequence.sample_index,
            text,
            position=len(ids) - 1,
            token_id=ids[-1],
            logprob=self._last_logprob(number) if request.params.return_logprob else None,
        )

    def finish(self, number: int, done: Completion) -> None:
        """Sequence `number` has ended as `done`."""
        stream = self._open.pop(number, None)
        if stream is not None:
            self._end(stream.sequence.request, done, stream.sent)

    def finish_unstarted(self, request: Request, done: Completion) -> None:
        """A sample of `request` is `done` without having begun."""
        if request.params.stream:
            self._end(request, done, 0)

    def _end(self, request: Request, done: Completion, sent: int) -> None:
        if self._emit is None:
            return
        event = StreamEvent(
            done.row_index,
            done.prompt_index,
            done.sample_index,
            (done.text or "")[sent:],
            finish_reason=done.finish_reason,
            stop_kind=done.stop_kind,
            matched_stop=done.matched_stop,
            completion_tokens=done.completion_tokens,
            error=done.error,
        )
        self._emit(self._for_all(request, event))

    def _for_all(self, request: Request, event: StreamEvent) -> list[StreamEvent]:
        """The event, and the same for rows that copy this one."""
        table = self._workload.table
        copies = (table[i] for i in self._workload.followers_of(request.index))
        return [event, *(replace(event, row_index=c.row_index, prompt_index=c.prompt_index) for c in copies)]
