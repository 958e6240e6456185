from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.flash.attention import FlashAttention, flash_factory
from batchgen.kernels.flash.library import FlashLibrary, find_flash
from batchgen.kernels.gpu import merge as gpu_merge
from batchgen.kernels.gpu.attention import TritonAttention
from batchgen.kernels.merge import merge_parts
from batchgen.kernels.types import AttentionArgs, AttentionBatch, KVPool
from tests.cases import examples
from tests.kernels.flash.fake_flash import Fakes, fakes
from tests.kernels.oracle import attend_by_token
from tests.kernels.steps import Shape, Step, StepBuilder, free_behind, group_of_one, only_rows

HALF = Shape(heads=6, kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float16)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Fill new memory with not-a-numbers, so that missing writes show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fakes(monkeypatch) as made:
        yield made


@pytest.fixture(params=[2, 3])
def library(request: pytest.FixtureRequest, fake: Fakes, tmp_path: Path) -> FlashLibrary:
    path = fake.write(tmp_path / f"_vllm_fa{request.param}_C.abi3.so", request.param)
    return find_flash((request.param,), str(path), lambda found: found)


class PlainPrefix:
    """The pass over shared prefixes with plain products in float32."""

    def __init__(self, pool: KVPool, batch: AttentionBatch) -> None:
        self.pool, self.batch = pool, batch

    def prefix_parts(self, layer: int, query: Tensor, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        batch, keys, values = self.batch, self.pool.keys[layer], self.pool.values[layer]
        assert batch.decode_lens is not None
        assert batch.decode_own_start is not None
        positions = torch.from_numpy(batch.decode_own_start + batch.decode_lens - 1)
        rows, heads = len(positions), query.shape[1]
        out, lse = torch.zeros(rows, heads, values.shape[3]), torch.full((rows, heads), -torch.inf)
        for group in batch.groups:
            for row in group.rows.tolist():
                k, v = (x[torch.from_numpy(group.pages)].flatten(0, 1).float() for x in (keys, values))
                at = group.start + torch.arange(len(k))
                seen = slice(None) if args.window is None else at > positions[row] - args.window
                k, v = (x[seen].repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
                if not len(k):
                    continue
                scores = args.scale * torch.einsum("nd,knd->nk", query[batch.decode_start + row].float(), k)
                if args.softcap is not None:
                    scores = args.softcap * torch.tanh(scores / args.softcap)
                part, part_lse = torch.einsum("nk,knd->nd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
                total = torch.logaddexp(lse[row], part_lse)
                out[row] = out[row] * torch.exp(lse[row] - total)[:, None] + part * torch.exp(part_lse - total)[:, None]
                lse[row] = total
        return out, lse


def attend(library: FlashLibrary, step: Step, triton: bool = False, **options: Any) -> Tensor:
    factory = flash_factory(library, TritonAttention, gpu_merge.merge_parts)
    made = (factory if triton else flash_factory(library, PlainPrefix, merge_parts))(step.pool, step.batch)
    return made.attend(0, step.query, step.key, step.value, AttentionArgs(0.25, **options))


def check(library: FlashLibrary, step: Step, triton: bool = False, **options: Any) -> None:
    """Compare with float64 (at most twice the error of plain products), and check the pool afterwards."""
    keys, values = step.filled()
    args = AttentionArgs(0.25, **options)
    truth = attend_by_token(step.batch, step.query, keys, values, args)
    plain = attend_by_token(step.batch, step.query, keys, values, args, keys.dtype)
    got = attend(library, step, triton, **options)
    assert got.dtype == step.query.dtype
    assert got.shape == truth.shape
    allowed = 2 * float((plain.double() - truth).abs().max()) + torch.finfo(plain.dtype).eps
    assert float((got.double() - truth).abs().max()) <= allowed
    torch.testing.assert_close(step.pool.keys[0], keys, equal_nan=True)
    torch.testing.assert_close(step.pool.values[0], values, equal_nan=True)


def mixed(shape: Shape, seed: int = 0) -> StepBuilder:
    """Chunks with and without a past, rows without a group, in one and in two."""
    builder = StepBuilder(shape, seed=seed)
    builder.chunk(33)
    prefix = builder.chunk(5, past=2 * shape.page_size)[:2]
    builder.chunk(1, past=2 * shape.page_size, prefix=prefix)
    size = shape.page_size
    builder.decode(1)
    builder.decode(40)
    builder.decode(3, own_start=4 * size)
    builder.decode(size, own_start=4 * size)
    builder.decode(size + 1, own_start=6 * size)
    builder.group([2, 3, 4], 0, 4)
    builder.group([4], 4 * size, 2)
    return builder


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 50},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 20, "softcap": 2.0, "sinks": True},
]


def with_sinks(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return {k: torch.linspace(-2, 3, heads) if k == "sinks" else v for k, v in options.items()}


@pytest.mark.parametrize(
    ("options", "dtype"), [*((options, torch.float16) for options in OPTIONS), (OPTIONS[-1], torch.bfloat16)], ids=str
)
def test_a_mixed_step(library: FlashLibrary, dtype: torch.dtype, options: dict[str, Any]) -> None:
    shape = Shape(6, 2, 16, 16, dtype=dtype)
    check(library, mixed(shape).build(), **with_sinks(options, 6))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[-1]], ids=str)
def test_a_mixed_step_with_the_triton_prefix_pass(library: FlashLibrary, options: dict[str, Any]) -> None:
    check(library, mixed(HALF, seed=1).build(), triton=True, **with_sinks(options, 6))


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("window", [1, 5, 15])
def test_freed_pages_behind_the_window_are_not_read(library: FlashLibrary, window: int, triton: bool) -> None:
    step = mixed(HALF).build()
    clean = attend(library, step, triton, window=window)
    free_behind(step, window)
    assert torch.equal(attend(library, step, triton, window=window), clean)


def chunks_only(b: StepBuilder) -> None:
    b.chunk(17)
    b.chunk(2, past=30)


def group_before_the_window(b: StepBuilder) -> None:
    b.group([b.decode(40, own_start=48)], 0, 3)


@pytest.mark.parametrize(
    ("fill", "options"),
    [
        (chunks_only, {"sinks": True}),
        (only_rows, {}),
        (group_before_the_window, {"window": 10}),
        (group_of_one, {"sinks": True}),
    ],
)
def test_steps_of_one_kind(library: FlashLibrary, fill: Callable[[StepBuilder], None], options: dict[str, Any]) -> None:
    builder = StepBuilder(HALF)
    fill(builder)
    for triton in (False, True):
        check(library, builder.build(), triton, **with_sinks(options, 6))


@pytest.mark.parametrize(
    ("heads", "dims", "page_size"), [((1, 1), (8, 8), 32), ((4, 1), (64, 64), 32), ((5, 5), (16, 32), 5)], ids=str
)
def test_heads_and_pages(
    heads: tuple[int, int], dims: tuple[int, int], page_size: int, fake: Fakes, tmp_path: Path
) -> None:
    """Version 3 alone supports keys and values of unequal sizes, and pages of any size."""
    for version in (2, 3) if page_size == 32 else (3,):
        path = fake.write(tmp_path / f"_vllm_fa{version}_C.abi3.so", version)
        library = find_flash((version,), str(path), lambda found: found)
        shape = Shape(*heads, *dims, page_size, torch.float16)
        check(library, mixed(shape).build(), window=9, sinks=torch.linspace(-2, 3, heads[0]))


def test_a_query_of_another_dtype(library: FlashLibrary) -> None:
    step = mixed(HALF).build()
    step.query = step.query.float()
    got = attend(library, step)
    assert got.dtype == torch.float32
    step.query = step.query.half()
    torch.testing.assert_close(got.half(), attend(library, step))


def test_layers_share_tables_and_schedules(library: FlashLibrary, fake: Fakes) -> None:
    step = mixed(HALF).build()
    pool = KVPool(step.pool.keys * 3, step.pool.values * 3, step.pool.page_size)
    made = FlashAttention(library, pool, step.batch, PlainPrefix)
    outs = [made.attend(layer, step.query, step.key, step.value, AttentionArgs(0.25)) for layer in range(3)]
    made.attend_stored(0, step.query, AttentionArgs(0.25, window=9))
    assert torch.equal(outs[0], outs[2])
    assert fake.schedules == (4 if library.version == 3 else 0)  # two parts, with a window and without
    tables = {call.get("page_table", call.get("block_table")).data_ptr() for call in fake.forwards}
    assert len(tables) == 2


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepBuilder, int | None]:
    size = draw(st.sampled_from([16, 32]))
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(kv_heads * draw(st.integers(1, 3)), kv_heads, 8, 8, size, torch.float16)
    builder = StepBuilder(shape, num_pages=256, seed=draw(st.integers(0, 99)))
    for _ in range(draw(st.integers(0, 3))):
        builder.chunk(draw(st.integers(1, 40)), past=draw(st.integers(0, 50)))
    for _ in range(draw(st.integers(0, 3))):
        builder.decode(draw(st.integers(1, 70)))
    # A path of nested groups: row i leaves it after level i, and is in the groups of all levels up to there.
    levels = draw(st.lists(st.integers(1, 3), max_size=3))
    ends = [sum(levels[: i + 1]) for i in range(len(levels))]
    rows = [builder.decode(draw(st.integers(1, 20)), own_start=end * size) for end in ends]
    for i, (pages, end) in enumerate(zip(levels, ends, strict=True)):
        builder.group(rows[i:], (end - pages) * size, pages)
    if not builder.chunks and not builder.rows:
        builder.chunk(3)
    return builder, draw(st.none() | st.integers(1, 60))


@examples(30)
@given(drawn=steps())
def test_random_steps(library: FlashLibrary, drawn: tuple[StepBuilder, int | None]) -> None:
    builder, window = drawn
    check(library, builder.build(), window=window)
