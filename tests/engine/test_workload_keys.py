"""Requests only share equal prefixes: the same ids or embeddings with the same adapter; checked against a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.workload import plan_workload
from batchgen.request.fields.params import SamplingParams
from batchgen.request.fields.prompts import StoredPrompt
from batchgen.request.table.embeds_store import EmbedsStore
from batchgen.request.table.request_table import RequestTable

ADAPTERS = ["one", "two"]
ROWS = st.tuples(
    st.sampled_from([None, *ADAPTERS]),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0]),
)
"""(adapter, whether given as embeddings, tokens or the numbers of the embeddings, temperature)"""


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(ROWS, max_size=24))
def test_only_equal_requests_share(rows: list[tuple[str | None, bool, list[int], float]]) -> None:
    table = RequestTable(EmbedsStore(2))
    for i, (adapter, embeds, values, temperature) in enumerate(rows):
        params = SamplingParams(lora_path=adapter, temperature=temperature, max_new_tokens=4)
        span = None
        if embeds:
            span = StoredPrompt(table.embeds.add(np.array([[v, 1] for v in values], np.float32)), len(values))
        table.append(i, 0, [0] * len(values) if embeds else values, params, i, 4, span)
    workload = plan_workload(table, adapters=ADAPTERS)
    contents = [(adapter, embeds, tuple(values)) for adapter, embeds, values, _ in rows]
    # Ids share prefixes; embeddings are only shared as a whole, as the store decides.
    shared = {(a, False, v[:n]) for a, e, v in contents if not e for n in range(1, len(v) + 1)}
    whole = {(a, True, v) for a, e, v in contents if e}
    assert workload.tree.distinct_tokens == len(shared) + sum(len(v) for _, _, v in whole)
    for i, (content, row) in enumerate(zip(contents, rows, strict=True)):
        equal = [j for j in range(i) if contents[j] == content and rows[j][3] == row[3] == 0.0]
        assert workload.leader[i] == (equal[0] if equal else i)
        assert (table[i].embeds is not None) == row[1]
    if any(adapter for adapter, _, _, _ in rows):
        assert workload.adapter.tolist() == [-1 if a is None else ADAPTERS.index(a) for a, _, _, _ in rows]
    else:
        assert workload.adapter is None


def test_embeddings_cut_differently_share_nothing() -> None:
    """The ids after the shorter prefix differ in meaning from the placeholder ids of the longer one."""
    table = RequestTable(EmbedsStore(2))
    whole = StoredPrompt(table.embeds.add(np.ones((6, 2), np.float32)), 6)
    for i, span in enumerate([whole, whole.cut(4, "right"), whole.cut(4, "left"), whole]):
        ids = [0] * span.length + [0, 0]
        table.append(i, 0, ids, SamplingParams(max_new_tokens=1), i, 1, span)
        assert table[i].embeds == span
        assert table[i].known_ids.tolist() == [0, 0]
    assert plan_workload(table).tree.distinct_tokens == 8 + 6 + 6


def test_a_duplicate_of_a_finished_request_is_generated() -> None:
    """The tokens of a request that an earlier run committed are in a file."""
    table = RequestTable()
    for i in range(3):
        table.append(i, 0, [1, 2], SamplingParams(temperature=0.0, max_new_tokens=1), i, 1)
    assert plan_workload(table).samples.tolist() == [1, 0, 0]
    assert plan_workload(table, np.array([True, False, False])).samples.tolist() == [0, 1, 1]
