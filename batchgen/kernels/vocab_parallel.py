"""Operations on logits [R, V] of which each rank has some columns: those of its part of the vocabulary, in order.

Token ids are those of the whole vocabulary, and all ranks get the same results. They exchange a few numbers a row:
largest logits, candidates, sums. Nothing waits for the host, so that graphs can capture it, except `replace_rows`.

Sampling is as in `kernels.sampling`: of the ranks' k candidates if all rows have top_k. Else survivors of top_k and
top_p are found without a sort: tokens have weights, 1 or a share of the largest probability, and the last survivor's
logit is that at which the weights of larger ones reach a limit. Its 32 bits follow from four histograms of 256 sums.
Weights are integers, so no sum depends on an order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels import counts
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.logprobs import GatheredLogprobs
from batchgen.kernels.noise import gumbel_at
from batchgen.kernels.ops import Ops
from batchgen.kernels.ranks import Ranks
from batchgen.kernels.sampling import GREEDY_TEMPERATURE, SampleResult, SamplingColumns, draw_candidates, greedy

WORD = 32
"""Tokens of a word of a bitmask. A rank's part of a vocabulary has whole words."""
_FEW = 1024
"""Most candidates of a row for top_k that ranks exchange; they find the survivors of a larger one without."""


def vocab_parallel_ops(ops: Ops, ranks: Ranks, size: int) -> Ops:
    """`ops` for logits of the rank's part of a vocabulary of `size` tokens."""
    if ranks.count == 1:
        return ops
    part = ranks.part(size, WORD)
    split = _SplitVocabulary(ops, ranks, part.start, part.stop, size)
    return replace(ops, **{op.name: getattr(split, op.name) for op in fields(Ops) if hasattr(split, op.name)})


@dataclass(frozen=True, slots=True)
class _SplitVocabulary:
    """A rank's part of a vocabulary. Its methods are operations of `Ops`. The last parts may be empty."""

    ops: Ops
    ranks: Ranks
    start: int
    stop: int
    size: int

    def vocab_size(self, logits: Tensor) -> int:
        return self.size

    def logits_at(self, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        inside = (ids >= self.start) & (ids < self.stop)
        logits = _columns(logits)
        found = logits[rows, (ids - self.start).clamp(0, logits.shape[1] - 1)].where(inside, 0.0)
        return self.ranks.sum(found) if found.numel() else found

    def set_logits(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        if not logits.shape[1] or not len(rows):
            return
        inside = (ids >= self.start) & (ids < self.stop)
        first = inside.int().argmax(0, keepdim=True)  # pairs of other parts repeat the first one of this part
        rows, ids, values = (torch.where(inside, each, each[first]) for each in (rows, ids, values))
        ids = (ids - self.start).clamp_(0, logits.shape[1] - 1)  # one pair that stays as it is if none is inside
        logits.index_put_((rows, ids), torch.where(inside[first], values, logits[rows, ids]))

    def mask_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
        self.set_logits(logits, rows, ids, logits.new_full(ids.shape, -torch.inf))

    def keep_only(self, logits: Tensor, whole: Tensor, rows: Tensor, ids: Tensor) -> None:
        own = _columns(logits)
        kept = own[rows, (ids - self.start).clamp_(0, own.shape[1] - 1)]
        logits.index_fill_(0, whole, -torch.inf)
        self.set_logits(logits, rows, ids, kept)

    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        if logits.shape[1]:
            inside = (ids >= self.start) & (ids < self.stop)
            ids = (ids - self.start).clamp_(0, logits.shape[1] - 1)
            self.ops.add_bias(logits, rows, ids, values.where(inside, 0.0))

    def penalise(
        self, logits: Tensor, rows: Tensor, slots: Tensor, lists: CountLists, penalties: Penalties, width: int
    ) -> None:
        """Tokens of other parts repeat one of this part, which `counts.penalise` allows."""
        vocab = logits.shape[1]
        if not vocab:
            return
        slots = slots.clamp(min=0)
        ids, times, used = (each.index_select(0, slots) for each in (lists.ids, lists.counts, lists.used))
        ids, times = ids[:, :width] - self.start, times[:, :width]
        inside = (ids >= 0) & (ids < vocab) & (torch.arange(width, device=ids.device) < used[:, None])
        first = inside.int().argmax(1, keepdim=True)
        ids, times = (torch.where(inside, each, each.gather(1, first)) for each in (ids, times))
        ids, times = (F.pad(each, (0, 0, 1, 0)) for each in (ids.clamp_(0, vocab - 1), times))  # slot 0 is unused
        own = CountLists(ids, times, F.pad(inside.any(1).int() * width, (1, 0)))
        counts.penalise(logits, rows, torch.arange(1, len(slots) + 1, device=slots.device), own, penalties, width)

    def drew_masked(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        return self.logits_at(logits, rows, tokens[rows]) == -torch.inf

    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        if logits.shape[1]:
            words = bitmask[:, self.start // WORD : -(-self.stop // WORD)].contiguous()
            self.ops.apply_bitmask(logits, words, rows)

    def replace_rows(self, logits: Tensor, rows: Tensor, function: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        """The first rank calls the function; the others learn what it returned."""
        whole = self.ranks.whole(logits[rows], self.size, WORD)
        result = function(whole) if self.ranks.rank == 0 else torch.zeros_like(whole)
        failed = torch.full((1,), result is None, dtype=torch.int32, device=logits.device)
        if bool(self.ranks.largest(failed)) or result is None:
            return None
        result = self.ranks.sum(result.clone())  # what the function returned may be its own
        logits.index_copy_(0, rows, result[:, self.start : self.stop])
        return result.amax(-1)

    def nan_rows(self, logits: Tensor) -> Tensor:
        return ~torch.isfinite(self._largest(_columns(logits)))

    def log_normalizers(self, logits: Tensor) -> Tensor:
        return torch.logsumexp(self.ranks.gather(self.ops.log_normalizers(_columns(logits))), 0)

    def argmax_lse(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, largest = self._best(_columns(logits))
        return ids, largest, self.log_normalizers(logits), ~torch.isfinite(largest)

    def token_logprobs(self, logits: Tensor, tokens: Tensor, normalizers: Tensor | None = None) -> Tensor:
        normalizers = self.log_normalizers(logits) if normalizers is None else normalizers
        rows = torch.arange(len(logits), device=logits.device)
        return self.logits_at(logits, rows, tokens).float() - normalizers

    def top_logprobs(self, logits: Tensor, k: int, normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        normalizers = self.log_normalizers(logits) if normalizers is None else normalizers
        values, ids = self._top(_columns(logits), k)
        return ids, values - normalizers[:, None]

    def _top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Values and ids of the k largest of each row, [R, k] float32 and int64, as `kernels.top.largest`."""
        most = min(k, logits.shape[1])
        ids, values = self.ops.top_logprobs(logits, most, logits.new_zeros(len(logits), dtype=torch.float32))
        ids = F.pad(ids + self.start, (0, k - most), value=self.size)  # after all tokens of the same value
        values = F.pad(values, (0, k - most), value=-torch.inf)
        found = self.ranks.gather(torch.stack((ids.double(), values.double())))  # [ranks, 2, R, k]
        ids, values = found.permute(1, 2, 0, 3).flatten(2)
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        return values[:, :k].float(), ids.gather(-1, order[:, :k]).long()

    def gather_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> GatheredLogprobs:
        normalizers = self.log_normalizers(logits)
        ids, top = targets.new_empty(len(logits), 0), normalizers.new_empty(len(logits), 0)
        if k:
            ids, top = self.top_logprobs(logits, k, normalizers)
        return GatheredLogprobs(normalizers, self.token_logprobs(logits, targets, normalizers), ids, top)

    def sample(self, logits: Tensor, columns: SamplingColumns, sample_rows: Tensor | None = None) -> SampleResult:
        logits = _columns(logits) if sample_rows is None else _columns(logits)[sample_rows]
        if columns.keys is None:
            tokens, largest = self._best(logits)
            return SampleResult(tokens, ~torch.isfinite(largest))
        largest, is_greedy = self._largest(logits), columns.temperature < GREEDY_TEMPERATURE
        temperature, (most, *others) = columns.temperature.where(~is_greedy, 1.0), columns.filters
        if most and most <= _FEW:
            top_k = columns.top_k.where(~is_greedy, 1)
            found = self._top(logits, min(most, self.size))
            tokens = draw_candidates(*found, temperature, top_k, columns.top_p, columns.min_p, columns.keys)
            return SampleResult(tokens, ~torch.isfinite(largest))
        logits = logits.float()
        x = (logits - largest[:, None]).div_(temperature[:, None])
        ids = torch.arange(self.start, self.start + x.shape[1], device=x.device)
        scores = gumbel_at(columns.keys, ids[None]).masked_fill_(is_greedy[:, None], 0.0).add_(x)
        needed = most != 0, *others
        if any(needed):
            filters = zip((columns.top_k, columns.top_p, columns.min_p), needed, strict=True)
            kept = self._survivors(logits, x, *(column if needs else None for column, needs in filters))
            scores.masked_fill_(~kept, -torch.inf)
        return SampleResult(self._best(scores)[0], ~torch.isfinite(largest))

    def filtered_scores(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, drawn: Tensor
    ) -> Tensor:
        width, logits = logits.shape[1], _columns(logits)
        cut = temperature >= GREEDY_TEMPERATURE
        x = (logits - self._largest(logits)[:, None]).div_(temperature.where(cut, 1.0)[:, None])
        kept = self._survivors(logits, x, top_k.where(cut, 0), top_p.where(cut, 1.0), min_p.where(cut, 0.0))
        kept |= torch.arange(self.start, self.start + x.shape[1], device=x.device) == drawn[:, None]
        return x.where(kept, -torch.inf)[:, :width]

    def _largest(self, logits: Tensor) -> Tensor:
        """[R] float32: each row's largest logit of all parts."""
        return self.ranks.gather(logits.amax(-1).float()).amax(0)

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax of each row, the lowest id of equal ones, and its value: [R] int64 and [R] float32."""
        ids = greedy(scores)[:, None]
        pairs = torch.cat(((ids + self.start).double(), scores.gather(-1, ids).double()), -1)
        each = self.ranks.gather(pairs)  # [ranks, R, 2]
        rank = each[..., 1].argmax(0)  # ranks are in the order of their ids
        ids, values = each.gather(0, rank[None, :, None].expand(1, -1, 2))[0].unbind(-1)
        return ids.long().clamp_(max=self.size - 1), values.float()

    def _survivors(self, logits: Tensor, x: Tensor, *filters: Tensor | None) -> Tensor:
        """[R, w] bool: tokens that survive top_k, top_p and min_p, None if no row has them; `x`: scores."""
        q, (top_k, top_p, min_p) = x.exp(), filters
        kept = torch.ones_like(q, dtype=torch.bool) if min_p is None else q >= min_p[:, None]
        keys = _ordered(logits)
        if top_k is not None:
            in_top_k = self._first(keys, torch.ones_like(keys), top_k.where(top_k > 0, self.size + 1))
            q, kept = q.where(in_top_k, 0.0), kept & in_top_k
        if top_p is not None:
            mass = q.double().mul_(2.0 ** (62 - self.size.bit_length())).round_().long()
            total = self.ranks.sum(mass.sum(-1))
            limit = (top_p.double() * total.double()).ceil().long().clamp_(min=1)
            kept &= self._first(keys, mass, limit.where(top_p < 1.0, total + 1))
        return kept

    def _first(self, keys: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
        """[R, w] bool: tokens before which, in the order (key falling, id rising), the weights add up to less.

        `keys`: [R, w] int64 of 32 bits; `weights`: [R, w] int64, of equal keys equal, or 0 for the last of them;
        `limit`: [R] int64, at least 1.
        """
        limit = limit[:, None]
        last = torch.zeros_like(limit)  # the leading bits of the last token's key
        for shift in (24, 16, 8, 0):
            bins = weights.new_zeros(len(keys), 256)
            bins.scatter_add_(1, keys >> shift & 255, weights.where(keys >> shift + 8 == last, 0))
            bins = self.ranks.sum(bins)
            larger = bins.flip(-1).cumsum(-1).flip(-1) - bins
            digit = (larger >= limit).sum(-1, keepdim=True).clamp_(max=255)
            limit = limit - larger.gather(1, digit)
            last = last << 8 | digit
        ties = weights.where(keys == last, 0)
        before = self.ranks.gather(ties.sum(-1))[: self.ranks.rank].sum(0)[:, None] + ties.cumsum(-1) - ties
        return (keys > last) | ((keys == last) & (before < limit))


def _columns(logits: Tensor) -> Tensor:
    """The logits, or of an empty part one column of -inf, whose id no token has."""
    return logits if logits.shape[1] else logits.new_full((len(logits), 1), -torch.inf)


def _ordered(logits: Tensor) -> Tensor:
    """[R, w] int64 of 32 bits in the order of float32 logits; equal for both zeros."""
    bits = (logits + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + (1 << 31)
