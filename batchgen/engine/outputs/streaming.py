"""Token-by-token events of rows with `stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from batchgen.engine.sequence import Sequence
from batchgen.engine.workload import JobWorkload
from batchgen.errors import ErrorInfo, row_error
from batchgen.request.completion import Completion, StreamEvent, Usage
from batchgen.request.table.request_table import Request
from batchgen.text.tokens.detokenize import echo_text
from batchgen.text.tokens.tokenizer import Tokenizer

Emit = Callable[[Seq[StreamEvent]], None]
"""Receives the events of a step, in order."""


@dataclass(slots=True)
class _Stream:
    sequence: Sequence
    sent: int = 0
    """Number of characters sent in events so far."""
    tokens: int = 0
    """Number of tokens with an event so far."""
    started: bool = False


class Streams:
    """The running samples of rows with `stream`. False if there are none.

    Each sample gets one event per token, in order, and one at its end. The `text`s of its events concatenate to the
    sample's text: a token's event has the text that later tokens and stops cannot change, the last event the rest.
    Duplicates of a row get the same events with their own row index.
    """

    def __init__(
        self, workload: JobWorkload, tokenizer: Tokenizer, emit: Emit | None, last_logprob: Callable[[int], float]
    ) -> None:
        """`last_logprob`: logprob of the last token of a sequence whose row returns logprobs."""
        self._last_logprob = last_logprob
        self._workload = workload
        self._tokenizer = tokenizer
        self._emit = emit
        self._open: dict[int, _Stream] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def start(self, number: int, sequence: Sequence) -> None:
        """Open a stream for sequence `number`, if its row has `stream` and there is a receiver."""
        if self._emit is not None and sequence.request.params.stream:
            self._open[number] = _Stream(sequence)

    def step(self, numbers: Iterable[int]) -> dict[int, ErrorInfo]:
        """Emit events for the sequences `numbers`, which have received a token or failed.

        Returns errors of sequences whose event cannot be made, by number.
        """
        events: list[StreamEvent] = []
        failed: dict[int, ErrorInfo] = {}
        for number in numbers:
            stream = self._open.get(number)
            # A sample whose masks leave no token may end without another one.
            if stream is not None and stream.sequence.error is None and len(stream.sequence.output_ids) > stream.tokens:
                try:
                    events += self._for_all(stream.sequence.request, self._token(number, stream))
                except Exception as error:
                    failed[number] = row_error(error, "making the row's events")
        if events and self._emit is not None:
            self._emit(events)
        return failed

    def _token(self, number: int, stream: _Stream) -> StreamEvent:
        sequence = stream.sequence
        request, ids = sequence.request, sequence.output_ids
        options = request.params.stream_options
        # A stop may cut the text of the last token; the last event has what remains.
        text = sequence.stops.next_output_text() if sequence.finish_reason is None else ""
        if not stream.started and request.params.echo:
            text = echo_text(request.prompt_ids.tolist(), self._tokenizer) + text
        stream.started = True
        stream.tokens = len(ids)
        stream.sent += len(text)
        key = request.row_index, request.prompt_index, sequence.sample_index
        logprob = self._last_logprob(number) if request.params.return_logprob else None
        usage = _usage(len(request.prompt_ids), len(ids)) if options and options.continuous_usage_stats else None
        return StreamEvent(*key, text, position=len(ids) - 1, token_id=ids[-1], logprob=logprob, usage=usage)

    def finish(self, number: int, done: Completion) -> None:
        """Emit the last event of sequence `number`, which has ended as `done`."""
        stream = self._open.pop(number, None)
        if stream is not None:
            self._end(stream.sequence.request, done, stream.sent)

    def finish_unstarted(self, request: Request, done: Completion) -> None:
        """Emit the only event of a sample of `request` that never started."""
        if request.params.stream:
            self._end(request, done, 0)

    def _end(self, request: Request, done: Completion, sent: int) -> None:
        if self._emit is None:
            return
        event = StreamEvent(
            *done.key,
            (done.text or "")[sent:],
            finish_reason=done.finish_reason,
            stop_kind=done.stop_kind,
            matched_stop=done.matched_stop,
            reasoning=done.reasoning,
            tool_calls=done.tool_calls,
            completion_tokens=done.completion_tokens,
            usage=_usage(done.prompt_tokens, done.completion_tokens) if request.params.stream_options else None,
            error=done.error,
        )
        self._emit(self._for_all(request, event))

    def _for_all(self, request: Request, event: StreamEvent) -> list[StreamEvent]:
        """The event, and its copies for duplicates of the row."""
        table = self._workload.table
        copies = (table[i] for i in self._workload.followers_of(request.index))
        return [event, *(replace(event, row_index=c.row_index, prompt_index=c.prompt_index) for c in copies)]


def _usage(prompt_tokens: int | None, completion_tokens: int | None) -> Usage | None:
    if prompt_tokens is None or completion_tokens is None:
        return None  # a sample that failed
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
