"""From ended sequences to completions: a sample's own, a prompt's together, and those of rows that copy it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from batchgen.engine.best_of import keep_best
from batchgen.engine.planning import Workload
from batchgen.engine.prompt_logprobs import PromptLogprobs
from batchgen.engine.sequence import Sequence
from batchgen.kernels.ops import Ops
from batchgen.request import Completion, Request
from batchgen.text.surround import surround
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Finished"]


class Finished:
    """Makes the completions of one job. Knows nothing of steps."""

    def __init__(
        self, workload: Workload, tokenizer: Tokenizer, vocab_size: int, ops: Ops, *, prompt_ids: bool
    ) -> None:
        """`prompt_ids`: whether completions carry their prompt's ids."""
        self._workload = workload
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._token_text = lru_cache(1 << 16)(tokenizer.token_text)
        self.prompts = PromptLogprobs(workload, vocab_size, self._token_text, ops)

    def sample(self, sequence: Sequence) -> Completion:
        """A sample that has ended: its tokens' texts, and its text with what `echo` and `suffix` put around it."""
        request = sequence.request
        cached = self._workload.tree.cached_tokens(request.index, sequence.sample_index)
        # An echo with logprobs has the prompt's: without its ids nobody could tell of which tokens.
        params = request.params
        done = sequence.completion(cached, prompt_ids=self._prompt_ids or (params.echo and params.return_logprob))
        if done.error is None and params.return_text_in_logprobs:
            done = replace(done, output_tokens_text=[self._token_text(token) for token in sequence.output_ids])
        if done.text is None or not (params.echo or params.suffix):
            return done
        text = surround(done.text, request.known_ids.tolist(), params, self._tokenizer)
        return replace(done, text=text)

    def prompt(self, request: Request, samples: list[tuple[float, Completion]]) -> list[Completion]:
        """A prompt whose samples have all ended, each with the mean logprob of its tokens: what is given back of it."""
        index, params = request.index, request.params
        failed = [done for _, done in samples if done.error is not None]
        if failed:
            # A prompt that fails is one error row, whatever became of its other samples: that of its first.
            found = [replace(min(failed, key=lambda done: done.sample_index), sample_index=0)]
        elif params.best_of is not None:
            found = keep_best(samples, params.n, lambda i: self._workload.tree.cached_tokens(index, i))
        else:
            found = sorted((done for _, done in samples), key=lambda done: done.sample_index)
        if not failed and params.return_logprob:
            found = self.prompts.complete(request, found)
        leader = int(self._workload.leader[index])
        if leader == index:
            return found
        # Generated itself although it has a leader, which an earlier run has committed: it says whose twin it is.
        return [replace(done, dedup_of=int(self._workload.table.row_index[leader])) for done in found]

    def copied(self, follower: int, samples: list[Completion]) -> list[Completion]:
        """The completions of a request that copies those of another one."""
        request = self._workload.table[follower]
        tree, leader = self._workload.tree, samples[0].row_index
        return [
            replace(
                done,
                row_index=request.row_index,
                prompt_index=request.prompt_index,
                seed=request.seed,
                cached_tokens=tree.cached_tokens(follower, done.sample_index) if done.error is None else None,
                dedup_of=leader,
            )
            for done in samples
        ]
