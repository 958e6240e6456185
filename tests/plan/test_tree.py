"""Prefix tree, against a dict trie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.plan.tree import PrefixTree, build_tree
from tests.cases import examples


def flat(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([t for p in prompts for t in p], np.int32)
    offsets = np.cumsum([0] + [len(p) for p in prompts]).astype(np.int64)
    return tokens, offsets


def tree_of(prompts: list[list[int]], keys: list[int] | None = None) -> PrefixTree:
    return build_tree(*flat(prompts), None if keys is None else np.array(keys, np.int64))


def trie_edges(prompts: list[list[int]], keys: list[int]) -> set[tuple[int, ...]]:
    """Every non-empty prefix with its key, i.e. the nodes of a trie with one token per edge."""
    return {(k, *p[: i + 1]) for k, p in zip(keys, prompts, strict=True) for i in range(len(p))}


def compressed(prompts: list[list[int]], keys: list[int]) -> set[tuple[int, ...]]:
    """Prefixes at which a prompt ends or paths branch."""
    edges = trie_edges(prompts, keys)
    children: dict[tuple[int, ...], int] = {}
    for edge in edges:
        children[edge[:-1]] = children.get(edge[:-1], 0) + 1
    ends = {(k, *p) for k, p in zip(keys, prompts, strict=True)}
    return {e for e in edges if e in ends or children.get(e, 0) > 1}


prompt = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.lists(st.sampled_from([0, 1, 2**31 - 1]), min_size=1, max_size=4),
    st.integers(1, 90).map(lambda n: [7] * n),
    st.integers(30, 70).flatmap(lambda n: st.lists(st.integers(0, 1), max_size=3).map(lambda x: [5] * n + x)),
)


@examples(400)
@given(st.lists(st.tuples(prompt, st.integers(-1, 1)), max_size=25), st.booleans())
def test_tree_equals_dict_trie(rows: list[tuple[list[int], int]], keyed: bool) -> None:
    prompts = [p for p, _ in rows]
    keys = [k if keyed else 0 for _, k in rows]
    tree = tree_of(prompts, keys if keyed else None)

    assert tree.order.tolist() == sorted(range(len(rows)), key=lambda i: (keys[i], prompts[i], i))
    assert tree.distinct_tokens == len(trie_edges(prompts, keys))
    assert tree.prompt_tokens == sum(map(len, prompts))
    requests = tree.order[tree.first_row].tolist()
    paths = [(keys[r], *prompts[r][:e]) for r, e in zip(requests, tree.end.tolist(), strict=True)]
    assert len(set(paths)) == len(paths)
    assert set(paths) == compressed(prompts, keys)
    for i, path in enumerate(paths):
        parent = int(tree.parent[i])
        assert parent < i
        assert tree.start[i] == (tree.end[parent] if parent >= 0 else 0)
        if parent >= 0:
            assert path[: len(paths[parent])] == paths[parent]
        below = [r for r in range(len(rows)) if (keys[r], *prompts[r][: len(path) - 1]) == path]
        assert sorted(tree.order[tree.first_row[i] : tree.last_row[i] + 1].tolist()) == below
        nodes = [j for j, p in enumerate(paths) if p[: len(path)] == path]
        assert nodes == list(range(i, tree.subtree_end[i]))
    for r, p in enumerate(prompts):
        assert paths[tree.node_of_request[r]] == (keys[r], *p)
    assert sum(len(p) - tree.cached_tokens(r) for r, p in enumerate(prompts)) == tree.distinct_tokens
    seen: set[tuple[int, ...]] = set()
    for r in tree.order.tolist():
        known = (keys[r], *prompts[r]) in seen
        seen.add((keys[r], *prompts[r]))
        assert (tree.cached_tokens(r) == len(prompts[r])) == known
        assert tree.cached_tokens(r, 1) == len(prompts[r])


def test_wrong_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        tree_of([[1], [], [2]])
    with pytest.raises(ValueError, match="1 keys for 2 prompts"):
        tree_of([[1], [2]], [0])
