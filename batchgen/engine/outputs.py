"""`OutputProcessor`: turns ended sequences into completions; `keep_best` selects samples for `best_of`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from batchgen.engine.capture.prompt_logprobs import PromptLogprobs
from batchgen.engine.sequence import Sequence
from batchgen.engine.workload import JobWorkload
from batchgen.kernels.ops import Ops
from batchgen.request.completion import Completion
from batchgen.request.table import Request
from batchgen.text.echo_suffix import add_echo_and_suffix
from batchgen.text.tokenizer import Tokenizer

__all__ = ["OutputProcessor", "keep_best"]


def keep_best(
    samples: list[tuple[float, Completion]], keep: int, cached_tokens: Callable[[int], int]
) -> list[Completion]:
    """The `keep` samples with the highest mean logprob, best first, renumbered from 0.

    Args:
        samples: (mean logprob of its tokens, sample) of one prompt, without errors. Ties keep the order of the sample
            indexes.
        keep: number of samples to keep.
        cached_tokens: `cached_tokens` by new sample index.

    Returns:
        The kept samples; `dropped_tokens` of the first is the number of tokens of the dropped ones.
    """
    ranked = [sample for _, sample in sorted(samples, key=lambda pair: (-pair[0], pair[1].sample_index))]
    kept = [replace(s, sample_index=i, cached_tokens=cached_tokens(i)) for i, s in enumerate(ranked[:keep])]
    dropped = sum(sample.completion_tokens or 0 for sample in ranked[keep:])
    return [replace(kept[0], dropped_tokens=dropped), *kept[1:]]


class OutputProcessor:
    """Makes the completions of one job."""

    def __init__(
        self, workload: JobWorkload, tokenizer: Tokenizer, vocab_size: int, ops: Ops, *, prompt_ids: bool
    ) -> None:
        """`prompt_ids`: whether completions contain their prompt's ids."""
        self._workload = workload
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._token_text = lru_cache(1 << 16)(tokenizer.token_text)
        self.prompts = PromptLogprobs(workload, vocab_size, self._token_text, ops)

    def finish_sample(self, sequence: Sequence) -> Completion:
        """The completion of an ended sample, with token texts, `echo` and `suffix` applied."""
        request = sequence.request
        cached = self._workload.tree.cached_tokens(request.index, sequence.sample_index)
        # An echo with logprobs needs the prompt's ids to say which tokens the logprobs belong to.
        params = request.params
        done = sequence.completion(cached, prompt_ids=self._prompt_ids or (params.echo and params.return_logprob))
        if done.error is None and params.return_text_in_logprobs:
            done = replace(done, output_tokens_text=[self._token_text(token) for token in sequence.output_ids])
        if done.text is None or not (params.echo or params.suffix):
            return done
        text = add_echo_and_suffix(done.text, request.known_ids.tolist(), params, self._tokenizer)
        return replace(done, text=text)

    def finish_prompt(self, request: Request, samples: list[tuple[float, Completion]]) -> list[Completion]:
        """The completions of a prompt whose samples have all ended; `samples`: (mean logprob, completion)."""
        index, params = request.index, request.params
        failed = [done for _, done in samples if done.error is not None]
        if failed:
            # A failed prompt yields one error row: that of its first failed sample.
            found = [replace(min(failed, key=lambda done: done.sample_index), sample_index=0)]
        elif params.best_of is not None:
            found = keep_best(samples, params.n, lambda i: self._workload.tree.cached_tokens(index, i))
        else:
            found = sorted((done for _, done in samples), key=lambda done: done.sample_index)
        if not failed and params.return_logprob:
            found = self.prompts.add_to_completions(request, found)
        leader = int(self._workload.leader[index])
        if leader == index:
            return found
        # It duplicates a row that an earlier run has committed, so it was generated, but `dedup_of` names that row.
        return [replace(done, dedup_of=int(self._workload.table.row_index[leader])) for done in found]

    def copy_for_follower(self, follower: int, samples: list[Completion]) -> list[Completion]:
        """The completions of a duplicate request, copied from those of its leader."""
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
