"""Linear layers in every layout that this machine supports, and the choice of the layout."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import layouts as module
from batchgen.kernels import linear as linears
from batchgen.kernels.cpu.library import loaded
from batchgen.kernels.cpu.matmul import methods
from batchgen.kernels.layouts import (
    LayoutChoice,
    Plain,
    can_pack,
    choose_layout,
    dots_are_faster,
    int8_refusal,
    layouts,
)
from batchgen.kernels.linear import Embedding, Linear, describe_products, forms, repacks
from tests.cases import examples

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("dtype", "name"), [(dtype, name) for dtype in DTYPES for name in layouts(dtype, "measured")])
@examples(20)
@given(
    rows=st.integers(0, 70),
    inner=st.integers(1, 100),
    outer=st.integers(1, 100),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_layouts_are_linear(
    dtype: torch.dtype, name: str, rows: int, inner: int, outer: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    shift = torch.randn(outer, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    layout = layouts(dtype, "measured")[name](weight, shift)
    got, plain = layout(x), F.linear(x, weight, shift)
    exact = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert got.dtype == dtype
    assert got.shape == (rows, outer)
    bound = 2 * (plain.double() - exact).norm() + 1e-5 * (1 + exact.norm())
    assert (got.double() - exact).norm() <= bound
    if name == "compiled bfp":  # integers with a scale: compare with the dequantised weight
        assert bool(((layout.dense() - weight).abs() <= 2**-8 * weight.abs() + 2**-13 * weight.abs().amax()).all())
    else:
        assert torch.equal(layout.dense(), weight)
    assert layout.bias is shift


@pytest.mark.parametrize("products", ["measured", "fixed", "torch"])
def test_linear_supports_more_dimensions_and_slices(products: module.Products) -> None:
    linear = Linear(torch.randn(10, 16), torch.randn(10), products=products)
    x = torch.randn(3, 5, 32)[..., ::2]
    assert linear.bias is not None
    torch.testing.assert_close(linear(x), x @ linear.dense_weight().T + linear.bias, atol=1e-5, rtol=1e-5)
    other = linear.with_product(lambda x, weight, bias: F.linear(x, 2 * weight))
    torch.testing.assert_close(other(x), 2 * x @ linear.dense_weight().T, atol=1e-5, rtol=1e-5)
    assert not other.packed
    assert (linear.in_features, linear.out_features) == (16, 10)


def test_available_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(layouts(torch.float64, "measured")) == ["plain"]
    assert not can_pack(torch.float64)
    assert list(layouts(torch.bfloat16, "torch")) == (["oneDNN"] if can_pack(torch.bfloat16) else []) + ["plain"]
    assert next(iter(layouts(torch.bfloat16, "measured"))).startswith("compiled") is loaded()
    assert set(forms(torch.ones(2, 2))) == set(layouts(torch.float32, "measured"))
    assert set(forms(torch.ones(2, 2, device="meta"))) == {"plain"}
    monkeypatch.setattr(module, "loaded", lambda: False)
    assert layouts(torch.bfloat16, "measured") == layouts(torch.bfloat16, "torch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_repacked_weight_is_a_copy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may overwrite the original: matrices of all sizes are loaded through the same memory."""
    cpu = torch.device("cpu")
    for name, make in [*layouts(dtype, "measured").items(), *layouts(dtype, "int8").items()]:
        if name == "compiled int8" and int8_refusal(dtype, cpu):
            continue
        with monkeypatch.context() as patch:
            taken = LayoutChoice(name, make, name)
            patch.setattr(linears, "choose_layout", lambda *_, taken=taken: taken)
            copied = repacks(dtype, cpu, "measured")
            assert not repacks(dtype, torch.device("meta"), "measured")
            for shape in ((16, 8), (33, 65), (1, 1)):
                weight, x = torch.ones(shape, dtype=dtype), torch.ones(3, shape[1], dtype=dtype)
                linear = Linear(weight)
                weight.fill_(2)
                expected = torch.full((3, shape[0]), (1 if copied else 2) * shape[1], dtype=dtype)
                torch.testing.assert_close(linear(x), expected, rtol=0.02, atol=0)
        assert copied is (name != "plain")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_has_the_rows_of_the_head_that_it_is_tied_to(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, make in layouts(dtype, "measured").items():
        with monkeypatch.context() as patch:
            taken = LayoutChoice(name, make, name)
            patch.setattr(linears, "choose_layout", lambda *_, taken=taken: taken)
            for shape in ((48, 16), (33, 65), (1, 1), (100, 7)):
                weight = torch.randn(shape).to(dtype)
                embedding = Embedding(weight, Linear(weight))
                assert embedding.packed is (name in ("compiled", "compiled dot"))
                for ids in (torch.arange(shape[0]), torch.zeros(2, 3, dtype=torch.int64)):
                    assert torch.equal(embedding(ids), F.embedding(ids, weight))
    assert not Embedding(weight).packed


def test_a_fixed_choice_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: pytest.fail("asked"))
    for products in ("fixed", "torch"):
        choose_layout.cache_clear()
        linear = Linear(torch.ones(3, 4), products=products)
        assert choose_layout(torch.float32, products).name == next(iter(layouts(torch.float32, products)))
        assert (linear.compiled is not None) is (products == "fixed" and loaded())
    assert Linear(torch.ones(2, 2, dtype=torch.float64)).packed is False
    choose_layout.cache_clear()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, float]]]:
    """An empty cache of timings, in place of the file that processes share."""
    figures: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(module, "load_timings", lambda subject, names: figures.get(subject))
    monkeypatch.setattr(module, "save_timings", figures.__setitem__)
    choose_layout.cache_clear()
    yield figures
    choose_layout.cache_clear()


class Slow(Plain):
    """A layout whose product takes a given time."""

    clock: float = 0.0

    def __init__(self, weight: Tensor, bias: Tensor | None, seconds: Callable[[], float]) -> None:
        super().__init__(weight, bias)
        self.seconds = seconds

    def __call__(self, x: Tensor) -> Tensor:
        Slow.clock += self.seconds()
        return super().__call__(x)


def test_the_fastest_layout_is_chosen_despite_disturbances(
    monkeypatch: pytest.MonkeyPatch, kept: dict[str, dict[str, float]]
) -> None:
    def of(*seconds: float) -> Callable[[Tensor, Tensor | None], Slow]:
        turns = itertools.cycle(seconds)
        return lambda weight, bias: Slow(weight, bias, lambda: next(turns))

    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: Slow.clock)
    found = {"first": of(9, 2, 50), "second": of(100, 1.5, 9, 9), "third": of(1.9), "fourth": of(1.4375)}
    monkeypatch.setattr(module, "layouts", lambda dtype, products: found)
    monkeypatch.setattr(module, "_SECONDS", 1e6)  # these layouts are slow
    taken = choose_layout(torch.float32, "measured")
    assert taken.name == "second"  # the fourth is not clearly faster
    assert taken.description == "second (1.5e+03 ms against first 2e+03 ms, third 1.9e+03 ms, fourth 1.4e+03 ms)"
    assert describe_products(torch.float32, torch.device("cpu"), "measured") == taken.description
    assert describe_products(torch.float32, torch.device("cuda"), "measured") is None

    # The next process chooses the same from the cache, without measuring.
    least = {"first": 2, "second": 1.5, "third": 1.9, "fourth": 1.4375}
    assert kept == {"layouts-float32": pytest.approx(least)}
    choose_layout.cache_clear()
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: pytest.fail("asked"))
    again = choose_layout(torch.float32, "measured")
    assert (again.name, again.description) == (taken.name, taken.description)
    assert again.make is found["second"]


@pytest.mark.skipif(not loaded() or "dot" not in methods(torch.bfloat16), reason="no dot instruction for bfloat16")
@pytest.mark.parametrize(("dot", "bfp", "taken"), [(2.0, 1.0, False), (1.05, 1.0, True), (1.0, 2.0, True)])
def test_attention_uses_the_fastest_product(
    kept: dict[str, dict[str, float]], dot: float, bfp: float, taken: bool
) -> None:
    dots_are_faster.cache_clear()
    kept["layouts-bfloat16"] = {"compiled": 9.0, "compiled dot": dot, "compiled bfp": bfp, "oneDNN": 9.0, "plain": 9.0}
    assert dots_are_faster() is taken
    dots_are_faster.cache_clear()


def test_disturbed_times_are_not_cached(monkeypatch: pytest.MonkeyPatch, kept: dict[str, dict[str, float]]) -> None:
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: Slow.clock)
    turns = itertools.count(60, -1)  # never the same time twice
    found = {
        "first": lambda weight, bias: Slow(weight, bias, lambda: 1.1 ** next(turns)),
        "second": lambda weight, bias: Slow(weight, bias, lambda: 1.0),
    }
    monkeypatch.setattr(module, "layouts", lambda dtype, products: found)
    assert choose_layout(torch.float32, "measured").name == "second"
    assert kept == {}


def test_measuring_does_not_change_other_threads(kept: dict[str, dict[str, float]]) -> None:
    """The number of threads changes only for the thread that measures."""
    before = torch.get_num_threads()
    seen: list[int] = []

    def measure() -> None:
        choose_layout(torch.float32, "measured")
        seen.append(torch.get_num_threads())

    measuring = threading.Thread(target=measure)
    measuring.start()
    while measuring.is_alive():
        seen.append(torch.get_num_threads())
    assert set(seen) == {before}
