"""Token counts of the sequences with penalties, as lists on the device, and the penalties computed from them.

Each sequence has a slot with its distinct tokens and their counts, in order of first occurrence. Tokens are counted on
the device, so that the host need not know them before the next draw.

    repetition   logit / r if it is positive, else logit * r, for every token of the list
    frequency    logit - f * count
    presence     logit - p if count > 0

in this order. The repetition rule is that of Keskar et al. 2019 as Hugging Face and vLLM apply it; the other two are
those of the OpenAI API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True)
class CountLists:
    """Token lists of S slots with room for W tokens each. Slot 0 is unused and stays empty: rows with slot 0 or a
    negative slot are skipped.
    """

    ids: Tensor
    """[S, W] int32, distinct within a slot"""
    counts: Tensor
    """[S, W] float32, 0 for a token that occurs in the prompt only"""
    used: Tensor
    """[S] int32, number of entries in use"""

    @staticmethod
    def empty(slots: int, width: int, device: torch.device) -> CountLists:
        """Empty lists."""
        return CountLists(
            torch.zeros(slots, width, dtype=torch.int32, device=device),
            torch.zeros(slots, width, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )

    def grown(self, slots: int, width: int) -> CountLists:
        """A copy with room for more slots or tokens."""
        lists = CountLists.empty(slots, width, self.ids.device)
        before, room = self.ids.shape
        lists.ids[:before, :room].copy_(self.ids)
        lists.counts[:before, :room].copy_(self.counts)
        lists.used[:before].copy_(self.used)
        return lists


class Penalties(NamedTuple):
    """Penalties of Q sequences, [Q] float32 each."""

    repetition: Tensor
    """Above 0; 1 changes nothing."""
    frequency: Tensor
    presence: Tensor


def count_tokens(lists: CountLists, slots: Tensor, rows: Tensor, tokens: Tensor, width: int) -> None:
    """Count one token for each of Q sequences, in place: increment its count, or append it to the list.

    Args:
        lists: of all sequences.
        slots: [Q] int64, distinct except 0 and negative ones.
        rows: [Q] int64, index into `tokens` of each sequence's token.
        tokens: [R] int64.
        width: at least 1 and the length of the longest of the Q lists afterwards; at most W.
    """
    slots = slots.clamp(min=0)
    drawn = tokens[rows].int()
    used = lists.used[slots].long()
    matches = lists.ids[:, :width].index_select(0, slots) == drawn[:, None]  # [Q, w]
    matches &= torch.arange(width, device=slots.device) < used[:, None]
    listed, place = matches.max(1)
    place = torch.where(listed, place, used)
    counts = lists.counts[slots, place].masked_fill_(~listed, 0) + 1
    lists.ids.index_put_((slots, place), drawn)
    lists.counts.index_put_((slots, place), counts)
    lists.used.index_put_((slots,), (used + (~listed & (slots > 0))).int())


def penalise(logits: Tensor, rows: Tensor, slots: Tensor, lists: CountLists, penalties: Penalties, width: int) -> None:
    """Apply the three penalties to the tokens in Q sequences' lists, in place.

    Args:
        logits: [R, V] float32. No result is +inf, however small the repetition penalty.
        rows: [Q] int64, each sequence's row of the logits, distinct.
        slots: [Q] int64.
        lists: of all sequences.
        penalties: of the sequences.
        width: at least 1 and the length of the longest of the Q lists; at most W.
    """
    slots = slots.clamp(min=0)
    used = lists.used[slots][:, None]  # [Q, 1]
    valid = torch.arange(width, device=slots.device) < used  # [Q, w]
    # Entries beyond a list's end repeat its first token: written twice, it gets the same value.
    ids = lists.ids[:, :width].index_select(0, slots)
    ids = torch.where(valid, ids, ids[:, :1]).long()
    counts = lists.counts[:, :width].index_select(0, slots)
    counts = torch.where(valid, counts, counts[:, :1])
    rows = rows[:, None]
    before = logits[rows, ids]
    factor = penalties.repetition.clamp(min=_FLOAT32.tiny)[:, None]
    values = torch.where(before > 0, (before / factor).clamp_(max=_FLOAT32.max), before * factor)
    values -= counts * penalties.frequency[:, None]
    values -= (counts > 0) * penalties.presence[:, None]
    logits.index_put_((rows, ids), torch.where(used > 0, values, before))
