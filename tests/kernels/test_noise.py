from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.noise import gumbel, gumbel_at, noise_bits, row_keys
from tests.kernels.references import noise_bits_reference, row_keys_reference

INT64 = st.integers(-(2**63), 2**63 - 1)


def keys_of(seeds: torch.Tensor, samples: int = 0, positions: int = 0) -> torch.Tensor:
    return row_keys(seeds, torch.full_like(seeds, samples), torch.full_like(seeds, positions))


def test_published_values_of_splitmix64() -> None:
    """The first outputs of the generator seeded with 0 are finalise(n * GAMMA), n = 1, 2, 3."""
    bits = noise_bits(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert bits.tolist() == [x >> 11 for x in known]


@given(st.lists(st.tuples(INT64, INT64, INT64, st.integers(0, 1 << 20)), min_size=1, max_size=20))
def test_torch_and_numpy_agree_bit_for_bit(rows: list[tuple[int, int, int, int]]) -> None:
    seeds, samples, positions, tokens = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    keys = row_keys(*(torch.from_numpy(c) for c in (seeds, samples, positions)))
    expected = row_keys_reference(seeds, samples, positions)
    np.testing.assert_array_equal(keys.numpy(), expected)
    np.testing.assert_array_equal(
        noise_bits(keys, torch.from_numpy(tokens)).numpy(), noise_bits_reference(expected, tokens)
    )


@pytest.mark.parametrize("vocab", [1, 63, 1000])
def test_candidates_get_the_noise_of_the_whole_row(vocab: int) -> None:
    keys = keys_of(torch.arange(-3, 4))
    before = keys.clone()
    whole = gumbel(keys, vocab)
    ids = torch.randint(0, vocab, (7, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_at(keys, ids), whole.gather(1, ids))
    for row in range(7):
        assert torch.equal(gumbel(keys[row : row + 1], vocab)[0], whole[row])
    assert torch.equal(keys, before)


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = torch.tensor([[0, 1, 2**52, 2**53 - 1]])
    monkeypatch.setattr("batchgen.kernels.noise.noise_bits", lambda keys, ids: edge)
    noise = gumbel_at(torch.zeros(1, dtype=torch.int64), edge)
    expected = -np.log(-np.log1p(-(edge[0, :3].numpy() + 0.5) * 2.0**-53))
    np.testing.assert_allclose(noise[0, :3].numpy(), expected, rtol=1e-6)
    assert -2.9 < float(noise[0, 3]) < -2.7


def uniforms(kind: str, count: int) -> np.ndarray:
    """`count` uniforms whose inputs differ in one coordinate."""
    zero, run = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    if kind == "tokens":
        keys, tokens = row_keys(zero, zero, zero), run
    else:
        order = ["seeds", "samples", "positions"].index(kind)
        columns = [zero, zero, zero]
        columns[order] = run
        keys, tokens = row_keys(*columns), zero
    return noise_bits(keys, tokens).numpy() * 2.0**-53


KINDS = ["seeds", "samples", "positions", "tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_along_every_coordinate(kind: str) -> None:
    count, cells = 1 << 16, 256
    u = uniforms(kind, count)
    observed = np.bincount((u * cells).astype(int), minlength=cells)
    chi2 = ((observed - count / cells) ** 2).sum() / (count / cells)
    assert abs(chi2 - (cells - 1)) < 4.5 * np.sqrt(2 * (cells - 1))
    for lag in (1, 2, 3, 64, 1000):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.5 / np.sqrt(count)


def test_every_bit_is_fair_and_flips_with_every_input_bit() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (4096,), generator=torch.Generator().manual_seed(1))
    base = noise_bits(keys_of(seeds), torch.zeros(4096, dtype=torch.int64))
    for bit in range(0, 64, 7):
        flip = -(2**63) if bit == 63 else 1 << bit
        changed = base ^ noise_bits(keys_of(seeds ^ flip), torch.zeros(4096, dtype=torch.int64))
        shares = [float(((changed >> b) & 1).double().mean()) for b in range(53)]
        assert all(abs(s - 0.5) < 5 * 0.5 / 64 for s in shares)


def test_neighbouring_rows_and_tokens_are_uncorrelated() -> None:
    noise = gumbel(keys_of(torch.arange(64)), 2048).double().numpy()
    assert abs(noise.mean() - 0.57722) < 4.5 * 1.2825 / np.sqrt(noise.size)
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    rows = np.corrcoef(noise)[~np.eye(64, dtype=bool)]
    assert np.abs(rows).max() < 5.5 / np.sqrt(2048)


def test_grids_of_keys_do_not_collide() -> None:
    run = torch.arange(64)
    seeds, samples, positions = (x.flatten() for x in torch.meshgrid(run, run, run, indexing="ij"))
    assert row_keys(seeds, samples, positions).unique().numel() == 64**3


def test_large_draws_keep_their_resolution() -> None:
    """Noise above 12 has a probability of 6e-6, where a 24-bit uniform would have only a hundred values."""
    noise = gumbel(keys_of(torch.arange(64)), 1 << 18)
    large = noise[noise > 12]
    expected = noise.numel() * float(np.exp(-12))
    assert abs(large.numel() - expected) < 4.5 * np.sqrt(expected)
    assert large.unique().numel() == large.numel()
