"""Running batch, against a sorted list of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from batchgen.plan.cache_groups import StateSpan
from batchgen.plan.running import Running


@dataclass(eq=False)
class Row:
    id: int
    row: int
    position: int
    limit: int
    capacity: int
    request: int
    node_id: int
    in_place: bool
    state: StateSpan | None
    pages: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(8))
def test_columns_equal_a_sorted_list(seed: int) -> None:
    """Rows are added and removed at random, beyond the initial capacity; rows at the end of their pages get another."""
    rng, running = Random(seed), Running[Row]()
    rows: list[Row] = []
    sources: dict[int, int] = {}
    position: dict[int, int] = {}
    for number in range(250):
        for _ in range(rng.choice([0, 0, 1, 3])):
            begin = rng.randrange(20)
            capacity = -(-(begin + 1) // 4) * 4
            number_of_row, place = number * 8 + len(rows) % 8, rng.randrange(30)
            limit = begin + rng.randint(1, 300)
            state = StateSpan(begin + 1, rng.randrange(99), rng.randrange(99)) if seed % 2 else None
            row = Row(number_of_row, place, begin, limit, capacity, 90 - place, place // 2, rng.random() < 0.5, state)
            if any(other.id == row.id for other in rows):
                continue
            row.pages = list(range(capacity // 4))
            running.add(row)
            rows.append(row)
            position[row.id] = begin
            sources[row.id] = 0 if state is None else state.source
        rows.sort(key=lambda row: (row.row, row.id))
        full = [i for i, row in enumerate(rows) if position[row.id] == row.capacity]
        assert running.at_capacity() == full
        running.grow(full, [99] * len(full), 4)
        before = running.decode_rows()
        assert running.decode_rows().sequence_ids is before.sequence_ids
        assert len(running) == len(rows)
        assert list(running) == rows
        assert running.tree_rows.tolist() == [row.row for row in rows]
        assert running.sequence_ids.tolist() == [row.id for row in rows]
        assert running.capacities.tolist() == [row.capacity for row in rows]
        assert running.requests.tolist() == [row.request for row in rows]
        assert running.nodes.tolist() == [row.node_id for row in rows]
        assert running.in_place.tolist() == [row.in_place for row in rows]
        want = [(row.id, position[row.id], row.pages) for row in rows]
        assert [(row.sequence, row.position, row.pages) for row in before] == want
        assert [(row.sequence, row.position, row.pages) for row in before[1:3]] == want[1:3]
        if seed % 2:
            states = [[sources[row.id] for row in rows], [row.state.slot for row in rows]]
            assert (before.states is None and not rows) or before.states.tolist() == states
        else:
            assert before.states is None
        for row in rows:
            position[row.id] += 1
            sources[row.id] = 0 if row.state is None else row.state.slot
        at_limit = [row for row in rows if position[row.id] == row.limit]
        assert running.advance() == at_limit
        assert [row.position for row in before] == [at for _, at, _ in want], "a plan's columns do not change"
        leaving = at_limit + [row for row in rows if row not in at_limit and rng.random() < 0.004]
        rng.shuffle(leaving)
        running.remove(leaving)
        assert [row.position for row in leaving] == [position[row.id] for row in leaving]
        rows = [row for row in rows if row not in leaving]
    assert len(rows) > 64
