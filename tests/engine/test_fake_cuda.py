"""The simulated GPU: operations return the CPU's values, and waits and mixed devices are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import batchgen
from batchgen.kernels.backend import AttentionNeeds, capability_of, choose_backend
from batchgen.kernels.chips import chip_tuning
from batchgen.kernels.device import device_for
from batchgen.kernels.gpu.ops import TRITON_OPS
from batchgen.kernels.types import AttentionBatch, ChunkPages, KVPool, LayerKV
from batchgen.models.base import ModelInput
from batchgen.models.load import load_model
from tests.engine.fake_cuda import FakeGpu, GpuTensor, fake_cuda
from tests.models.tiny import save_tiny

Operation = Callable[[Tensor], object]
CUDA = torch.device("cuda")


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_cuda(captures=True) as found:
        yield found


def on_gpu(values: Tensor) -> Tensor:
    return GpuTensor(values.clone())


def host(found: object) -> list[Tensor]:
    """All results of an operation, on the host, without a wait."""
    parts = found if isinstance(found, list | tuple) else [found]
    return [part.behind if isinstance(part, GpuTensor) else torch.as_tensor(part) for part in parts]


def set_item(x: Tensor, index: object, value: object) -> Tensor:
    x[index] = value  # type: ignore[index, assignment]
    return x


def ints(x: Tensor, *values: int) -> Tensor:
    """Integers on the device of `x`, created without a wait."""
    made = torch.zeros(len(values), dtype=torch.int64, device=x.device)
    for place, value in enumerate(values):
        made[place : place + 1] = value
    return made


QUIET: dict[str, Operation] = {
    "add": lambda x: x + 1,
    "in place": lambda x: x.mul_(2).add_(x),
    "view": lambda x: x.view(-1)[2:5],
    "write through a view": lambda x: (x[1].fill_(7), x)[1],
    "set some": lambda x: set_item(x, slice(1, 2), 0.5),
    "set a row": lambda x: set_item(x, 1, 0.5),
    "set by a mask": lambda x: set_item(x, x > 1, 0.0),
    "index": lambda x: x[ints(x, 2, 0)],
    "index_put": lambda x: set_item(x, ints(x, 2, 0), x[:2].clone()),
    "index_copy": lambda x: x.index_copy_(0, ints(x, 2), x[:1].clone()),
    "index_select": lambda x: x.index_select(0, ints(x, 2, 2)),
    "gather": lambda x: x.gather(1, ints(x, 3, 1, 2)[:, None]),
    "scatter": lambda x: x.scatter_(1, ints(x, 3, 1, 2)[:, None], 9.0),
    "scatter_add": lambda x: x.scatter_add_(1, ints(x, 3, 1, 2)[:, None], x.clone()),
    "embedding": lambda x: F.embedding(ints(x, 2, 0), x),
    "linear": lambda x: F.linear(x, torch.ones(5, 4, device=x.device), torch.ones(5, device=x.device)),
    "matmul": lambda x: x @ x.T,
    "out": lambda x: torch.mm(x, x.T, out=torch.empty(3, 3, device=x.device)),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "number on the host": lambda x: x * torch.tensor(2.0),
    "fill with a number on the host": lambda x: x.fill_(torch.tensor(2.0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, -torch.inf),
    "softmax": lambda x: x.log_softmax(-1),
    "sort": lambda x: x.sort(-1, descending=True),
    "topk": lambda x: x.topk(2),
    "cumsum": lambda x: x.cumsum(-1),
    "argmax": lambda x: x.argmax(-1),
    "cat": lambda x: torch.cat([x, x[:1]]),
    "stack": lambda x: torch.stack([x[0], x[1]]),
    "split": lambda x: x.split([1, 2]),
    "expand": lambda x: x[:1].expand(3, 4).contiguous(),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "bits": lambda x: x.view(torch.int32),
    "stays": lambda x: x.to(x.device),
    "arange": lambda x: torch.arange(3, device=x.device) * x.new_ones(3),
    "repeat with a size": lambda x: x.repeat_interleave(ints(x, 1, 0, 2), 0, output_size=3),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "histogram": lambda x: x.histc(4, 0, 2),
    "norm": lambda x: F.rms_norm(x, (4,)),
}
WAITS: dict[str, Operation] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.argmax()),
    "bool": lambda x: bool((x > 1).any()),
    "tolist": lambda x: x.tolist(),
    "slice": lambda x: x[: x.argmin()],
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copied to the host": lambda x: torch.empty(3, 4).copy_(x),
    "copied from the host": lambda x: x.copy_(torch.ones(3, 4)),
    "pageable": lambda x: torch.from_numpy(np.ones(3)).to(x.device),
    "pageable, said not to block": lambda x: torch.from_numpy(np.ones(3)).to(x.device, non_blocking=True),
    "one number set": lambda x: set_item(x[0], 1, 0.5),
    "literal": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "list of rows": lambda x: x[[0, 1]],
    "rows on the host": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.nonzero(),
    "where alone": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "set by a mask to tensors": lambda x: set_item(x, x > 1, torch.zeros(1, device=x.device)),
    "masked_select": lambda x: x.masked_select(x > 1),
    "fill with a number on the device": lambda x: x.masked_fill(x > 1, x[0, 0]),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x.repeat_interleave(ints(x, 1, 0, 2), 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "one_hot": lambda x: F.one_hot(ints(x, 1, 2)),
}
REFUSED: dict[str, Operation] = {
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "add": lambda x: x + torch.ones(4),
    "cat": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "gather": lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.int64)),
    "values": lambda x: set_item(x, ints(x, 1, 2), torch.ones(2, 4)),
    "host by device": lambda x: torch.ones(4)[ints(x, 1)],
    "kernel": lambda x: TRITON_OPS.rms_norm(x, torch.ones(4), 1e-6),
    "shape in place": lambda x: x.squeeze_(0),
}


@pytest.mark.parametrize("inference", [True, False])
def test_operations_equal_the_cpu_and_do_not_wait(gpu: FakeGpu, inference: bool) -> None:
    for name, operation in QUIET.items():
        check_quiet(gpu, name, operation, inference)


def check_quiet(gpu: FakeGpu, name: str, operation: Operation, inference: bool) -> None:
    with torch.inference_mode(inference):
        values = torch.arange(12.0).view(3, 4) / 5
        expected = host(operation(values.clone()))
        x = on_gpu(values)
        assert x.is_cuda
        assert x.device == torch.device("cuda", 0)
        found = operation(x)
        assert all(part.is_cuda for part in (found if isinstance(found, list | tuple) else [found]))
        for ours, theirs in zip(host(found), expected, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, msg=name)
    assert gpu.syncs == [], name


@pytest.mark.parametrize("inference", [True, False])
def test_every_planted_wait_is_recorded(gpu: FakeGpu, inference: bool) -> None:
    for name, operation in WAITS.items():
        gpu.syncs.clear()
        with torch.inference_mode(inference):
            operation(on_gpu(torch.arange(12.0).view(3, 4) / 5))
        assert gpu.syncs, name
        assert {sync.place.split(":")[0] for sync in gpu.syncs} == {"test_fake_cuda.py"}, name


@pytest.mark.parametrize("inference", [True, False])
def test_what_a_gpu_rejects_raises(gpu: FakeGpu, inference: bool) -> None:
    for operation in REFUSED.values():
        with torch.inference_mode(inference), pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
            operation(on_gpu(torch.ones(3, 4)))


def test_a_wait_names_the_line_of_batchgen(gpu: FakeGpu) -> None:
    planted = str(Path(batchgen.__file__).parent / "engine" / "planted.py")
    exec(compile("def read(x):\n\n    return x.item()", planted, "exec"), found := {})
    found["read"](on_gpu(torch.ones(1)))
    assert [str(s) for s in gpu.syncs] == [
        "batchgen/engine/planted.py:3: aten._local_scalar_dense.default reads a number"
    ]


def test_host_tensors_are_not_changed(gpu: FakeGpu) -> None:
    x = torch.ones(3)
    assert x[x > 0].tolist() == [1, 1, 1]
    assert type(x.to(torch.int64)) is Tensor
    assert gpu.syncs == []


def test_views_of_normal_tensors_are_normal(gpu: FakeGpu) -> None:
    pool = torch.zeros(4, 2, device=CUDA)
    with torch.inference_mode():
        pool.view(-1).index_copy_(0, torch.arange(3, device=CUDA), torch.ones(3, device=CUDA))
        pool[1, 1:] = torch.full((1,), 2.0, device=CUDA)
    pool.add_(1)
    assert host(pool)[0].tolist() == [[2, 2], [2, 3], [1, 1], [1, 1]]


def test_device_transfers_do_not_wait(gpu: FakeGpu) -> None:
    device = device_for(CUDA)
    assert device is gpu.device
    ids, rows = device.upload(np.arange(4), np.ones((2, 2), np.float32))
    assert ids.is_cuda
    assert rows.is_cuda
    device.upload_into(np.arange(2) + 7, ids)
    download = device.download(ids * 2, rows)
    assert [array.tolist() for array in download.wait()] == [[14, 16, 4, 6], [[1, 1], [1, 1]]]
    late = device.download(ids)
    ids.add_(1)
    with pytest.raises(AssertionError, match="overwritten"):
        late.wait()
    assert gpu.syncs == []
    assert (gpu.device.counts.uploads, gpu.device.counts.uploads_into) == (1, 1)
    assert gpu.device.counts.downloads == {"tokens": 2}
    with pytest.raises(AssertionError, match="on the host already"):
        device.download(torch.ones(1))


def test_copies_of_pinned_memory_are_recorded_and_do_not_wait(gpu: FakeGpu) -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert pinned.to(CUDA, non_blocking=True).is_cuda
    torch.empty(3, pin_memory=True).copy_(on_gpu(torch.ones(3)), non_blocking=True)
    assert len(gpu.copies) == 2
    assert gpu.syncs == []
    pinned.to(CUDA)
    assert len(gpu.syncs) == 1


def test_graphs_are_replayed(gpu: FakeGpu) -> None:
    with torch.inference_mode():
        (x,) = gpu.device.upload(np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32))
        weight = torch.ones(16, device=CUDA)
        out: list[Tensor] = []
        graph = gpu.device.capture(lambda: out.append(TRITON_OPS.rms_norm(x * 2, weight, 1e-6) + 1))
        assert out[0].is_cuda
        assert host(out[0])[0].isnan().all()
        graph.replay()
        expected = F.rms_norm(host(x)[0] * 2, (16,), None, 1e-6) + 1
        torch.testing.assert_close(host(out[0])[0], expected)
        for mistake in (WAITS["item"], WAITS["cpu"], WAITS["literal"], WAITS["mask"], gpu.device.download):
            with pytest.raises(RuntimeError, match="inside a capture"):
                gpu.device.capture(lambda call=mistake: call(x))  # type: ignore[misc]
    assert gpu.syncs == []


def test_the_machine_has_a_gpu_until_the_block_ends() -> None:
    with fake_cuda(name="NVIDIA A100", capability=(8, 0), memory=1 << 20) as gpu:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "NVIDIA A100"
        assert torch.cuda.mem_get_info(CUDA) == (1 << 19, 1 << 20)
        assert capability_of(CUDA) == (8, 0)
        assert chip_tuning(CUDA).chip == "sm_80"
        needs = AttentionNeeds(CUDA, (8, 0), (LayerKV(1, 16, 16),), 1, torch.float32, 4)
        assert choose_backend("triton", needs).name == "triton"
        gpu.syncs.clear()
        torch.cuda.synchronize()
        assert len(gpu.syncs) == 1
        moved = torch.nn.Linear(2, 3).to("cuda")
        assert moved(torch.ones(1, 2, device="cuda")).shape == (1, 3)
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)
    assert type(torch.ones(1) + 1) is Tensor


def test_a_step_of_a_model_gives_the_same_logits(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, num_hidden_layers=2)

    def logits(device: str) -> Tensor:
        model = load_model(tmp_path, implementation="native", dtype="float32", device=device)  # type: ignore[arg-type]
        spec = model.spec
        where = spec.device
        pool = KVPool.allocate(list(spec.kv_layers), 4, 4, torch.float32, where)
        needs = AttentionNeeds(where, capability_of(where), spec.kv_layers, spec.num_heads, torch.float32, 4)
        backend = choose_backend("triton", needs)
        ids, positions, slots = device_for(where).upload(np.arange(3, 9), np.arange(6), np.arange(4, 10))
        chunk = ChunkPages(0, 6, 6, np.array([1, 2]))
        batch = AttentionBatch(slot_mapping=slots, chunks=[chunk], decode_start=6)
        attention = backend.attention(pool, batch)
        return model.logits(model.hidden(ModelInput(ids, positions, attention, ops=backend.ops)))

    with torch.inference_mode():
        expected = logits("cpu")
        with fake_cuda():
            found = logits("cuda")
            assert found.is_cuda
    torch.testing.assert_close(host(found)[0], expected, atol=1e-5, rtol=1e-5)
