"""Cuts a step in two that do the same one after the other: for a step that proved too large for the device's memory."""

from __future__ import annotations

from dataclasses import replace

from batchgen.plan.types import PrefillChunk, PrefixGroup, SampleRows, StepPlan

__all__ = ["split_plan"]


def split_plan(plan: StepPlan, page_size: int, at_tokens: int | None = None) -> tuple[StepPlan, StepPlan] | None:
    """Two plans which, run one after the other, do what `plan` does.

    Flat tokens, and with them samples, are dealt out in order: those of the halves behind each other are the plan's
    own. A chunk may be cut between two positions. A last single token of a chunk is first stored and then computed
    again, without being stored, for the samples that draw from it; of several samples half draw each time. `starts`
    and `copies` are the first half's.

    Args:
        plan: the step; its lists are shared, not copied, where they stay as they are.
        page_size: S, positions of a page.
        at_tokens: flat tokens of the first half, half of them if None; brought into 1..T-1.

    Returns:
        None where nothing is left to cut: a token that at most one sample draws from, and that need not be stored or
        is not drawn from.
    """
    total = plan.tokens
    if total < 2:
        return _by_samples(plan) if total else None
    at = min(max(total // 2 if at_tokens is None else at_tokens, 1), total - 1)
    left, right = _cut_chunks(plan.prefills, at, page_size)
    begun = sum(chunk.end - chunk.start for chunk in left)
    decodes = at - begun
    mine = int((plan.samples.tokens < at).sum())
    first = StepPlan(
        starts=plan.starts,
        copies=plan.copies,
        prefills=left,
        decodes=plan.decodes[:decodes],
        groups=_groups(plan.groups, 0, decodes),
        samples=plan.samples[:mine],
    )
    second = StepPlan(
        prefills=right,
        decodes=plan.decodes[decodes:],
        groups=_groups(plan.groups, decodes, len(plan.decodes)),
        samples=SampleRows(plan.samples.numbers[mine:], plan.samples.tokens[mine:] - at),
    )
    return first, second


def _by_samples(plan: StepPlan) -> tuple[StepPlan, StepPlan] | None:
    """Cut what draws from a single token."""
    draws = len(plan.samples)
    if not plan.prefills or draws < (1 if plan.prefills[0].store else 2):
        return None
    again = [replace(plan.prefills[0], store=False)]
    return (
        replace(plan, samples=plan.samples[: draws // 2]),
        StepPlan(prefills=again, samples=plan.samples[draws // 2 :]),
    )


def _cut_chunks(chunks: list[PrefillChunk], at: int, page_size: int) -> tuple[list[PrefillChunk], list[PrefillChunk]]:
    """The chunks with the first `at` flat tokens and those with the rest."""
    for i, chunk in enumerate(chunks):
        length = chunk.end - chunk.start
        if at < length:
            if not at:
                return chunks[:i], chunks[i:]
            middle = chunk.start + at
            head = replace(chunk, end=middle, pages=chunk.pages[: -(-middle // page_size)])
            return [*chunks[:i], head], [replace(chunk, start=middle), *chunks[i + 1 :]]
        at -= length
    return chunks, []


def _groups(groups: list[PrefixGroup], low: int, high: int) -> list[PrefixGroup]:
    """The groups among decode rows [low, high), counted from `low`.

    One row alone is no group: its own pages then begin further up. Deeper groups are parts of those above them, so that
    none is left whose row has lost one above it.
    """
    found = []
    for group in groups:
        rows = [row - low for row in group.rows if low <= row < high]
        if len(rows) > 1:
            found.append(replace(group, rows=rows))
    return found
