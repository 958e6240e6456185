"""Token counts and penalties in Triton's interpreter, against PyTorch."""

from __future__ import annotations

from random import Random

import pytest
import torch

from batchgen.kernels import counts as pytorch
from batchgen.kernels.counts import CountLists, Penalties
from batchgen.kernels.gpu import counts as gpu
from tests.kernels.logit_rows import drawn, strided
from tests.kernels.penalised import listed, lists_of

torch.set_num_threads(1)


def outputs(count: int, vocab: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(0, longest))] for _ in range(count)]


def columns(rows: int, seed: int) -> Penalties:
    generator = torch.Generator().manual_seed(seed)
    repetition = torch.rand(rows, generator=generator) + 0.5
    return Penalties(repetition, *(4 * torch.rand(rows, generator=generator) - 2 for _ in range(2)))


@pytest.mark.parametrize("kind", ["packed", "padded", "transposed"])
@pytest.mark.parametrize(
    ("rows", "vocab", "longest"), [(1, 1, 1), (7, 63, 50), (3, 2000, 900), (5, 40, 0), (4, 64, 256)]
)
def test_penalties(rows: int, vocab: int, longest: int, kind: str) -> None:
    logits = strided(drawn(rows, vocab), kind)
    expected = logits.clone()
    listed_tokens = outputs(rows, vocab, longest)
    lists = lists_of(listed_tokens, outputs(rows, vocab, longest // 2, seed=1))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    slots = order + 1
    slots[-1] = -(rows % 2)  # no slot
    for ours, those in ((gpu, logits), (pytorch, expected)):
        ours.penalise(those, order, slots, lists, columns(rows, vocab), max(1, int(lists.used.max())))
    torch.testing.assert_close(logits, expected, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("factor", [0.3, 1.1, 2.0])
def test_repetition_only_equals_pytorch_bitwise(factor: float) -> None:
    logits = drawn(3, 100)
    expected = logits.clone()
    lists, rows = lists_of(outputs(3, 100, 90)), torch.arange(3)
    for ours, those in ((gpu, logits), (pytorch, expected)):
        rest = Penalties(torch.full((3,), factor), torch.zeros(3), torch.zeros(3))
        ours.penalise(those, rows, rows + 1, lists, rest, lists.ids.shape[1])
    assert torch.equal(logits, expected)


# The interpreter's numpy warns about the quotient, which is then clamped to the largest float.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("factor", [1e-45, 1e-38, 2.0])
def test_no_penalty_makes_a_row_unusable(factor: float) -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0, -torch.inf, 1.0, 3e38]])
    expected = logits.clone()
    lists, row = lists_of([[0, 1, 2, 3, 5]]), torch.tensor([0])
    for ours, those in ((gpu, logits), (pytorch, expected)):
        rest = Penalties(torch.full((1,), factor), torch.zeros(1), torch.zeros(1))
        ours.penalise(those, row, row + 1, lists, rest, 5)
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits).tolist() == [[True, True, True, False, True, True]]


@pytest.mark.parametrize(("vocab", "longest"), [(1, 1), (30, 40), (5000, 2500)])
def test_counts(vocab: int, longest: int) -> None:
    """Lists of zero, one and several blocks, with rows without a slot, which may all have the same slot number."""
    rng = Random(vocab)
    lists = lists_of(outputs(5, vocab, longest), outputs(5, vocab, longest // 2, seed=1))
    both = [lists.grown(8, lists.ids.shape[1] + 16) for _ in range(2)]
    for _ in range(12):
        slots = [*rng.sample(range(1, 8), 6), 0, -1, 0]
        tokens = torch.tensor([rng.randrange(vocab) for _ in range(11)])
        tokens[::2] = lists.ids[rng.randint(1, 5), 0]  # a token that is often listed
        rows = rng.sample(range(11), len(slots))
        for ours, those in zip((gpu, pytorch), both, strict=True):
            ours.count_tokens(those, torch.tensor(slots), torch.tensor(rows), tokens, those.ids.shape[1])
    assert [listed(both[0], slot) for slot in range(8)] == [listed(both[1], slot) for slot in range(8)]
    assert listed(both[0], 0) == {}
    assert any(max(listed(both[0], slot).values(), default=0) > 1 for slot in range(8))


def test_no_rows() -> None:
    lists, none = lists_of([[1, 2]]), torch.empty(0, dtype=torch.int64)
    before = CountLists(lists.ids.clone(), lists.counts.clone(), lists.used.clone())
    gpu.count_tokens(lists, none, none, torch.tensor([4]), 3)
    gpu.penalise(drawn(1, 5), none, none, lists, Penalties(*[torch.empty(0)] * 3), 3)
    assert torch.equal(lists.ids, before.ids)
    assert torch.equal(lists.used, before.used)


def test_a_full_list_is_never_overrun() -> None:
    lists = lists_of([[1, 2], [3, 4]])
    full = CountLists(lists.ids[:, :2].contiguous(), lists.counts[:, :2].contiguous(), lists.used)
    gpu.count_tokens(full, torch.tensor([1]), torch.tensor([0]), torch.tensor([9]), 2)
    assert [listed(full, slot) for slot in (1, 2)] == [{1: 1, 2: 1}, {3: 1, 4: 1}]
