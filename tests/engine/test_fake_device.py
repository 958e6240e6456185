"""The stand-in devices detect mistakes: each one is planted here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import batchgen
from batchgen.kernels.device import HOST, Device, as_array, device_for
from batchgen.kernels.gpu.ops import TRITON_OPS
from tests.engine.fake_cuda import CUDA, FakeGpu, GpuTensor, fake_cuda
from tests.engine.fake_device import LateDevice, LateDownload, Wait

Operation = Callable[[Tensor], object]


def test_uploads_are_packed_copies() -> None:
    device: Device = LateDevice()
    arrays = [np.arange(3), np.array([True]), np.empty((0, 4), np.float32), np.arange(6, dtype=np.uint16).reshape(2, 3)]
    tensors = device.upload(*arrays)
    assert [as_array(t).tolist() for t in tensors] == [a.tolist() for a in arrays]
    assert [t.dtype for t in tensors] == [HOST.upload(a)[0].dtype for a in arrays]
    arrays[0][:] = 7
    assert tensors[0].tolist() == [0, 1, 2]
    for array, target in (
        (np.arange(3), torch.zeros(2, dtype=torch.int64)),
        (np.arange(2), torch.zeros(2)),
        (np.arange(2), torch.zeros(4, dtype=torch.int64)[::2]),
        (np.zeros((1, 2)), torch.zeros(1, 2, dtype=torch.float64)),
    ):
        with pytest.raises(AssertionError):
            device.upload_into(array, target)


def test_downloads_hold_poison_until_they_are_waited_for() -> None:
    device = LateDevice()
    sources = [torch.ones(2), torch.ones(1, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16)]
    download = device.download(*sources)
    assert isinstance(download, LateDownload)
    early = [array.copy() for array in download.arrays]
    assert np.isnan(early[0]).all()
    assert early[1].tolist() == [-(2**62)]
    assert torch.from_numpy(early[2]).view(torch.bfloat16).isnan().all()
    assert not download.ready()
    device.upload(np.arange(1))
    assert download.ready()
    assert [array.tolist() for array in download.wait()] == [[1, 1], [1], as_array(sources[2]).tolist()]
    late = device.download(sources[0])
    sources[0].add_(1)
    with pytest.raises(AssertionError, match="tensor 0 of a download was overwritten"):
        late.wait()


def test_waits_record_how_late_they_are() -> None:
    device = LateDevice()
    first = device.download(torch.ones(1))
    device.upload(np.arange(2))
    second = device.download(torch.ones(1))
    second.wait()
    first.wait()
    device.download(torch.ones(1), lane="outputs").wait()
    assert device.counts.waits == [
        Wait("tokens", 0, 0, overtook=True),
        Wait("tokens", 1, 1, overtook=False),
        Wait("outputs", 0, 0, overtook=False),
    ]
    assert device.unread == {"tokens": 0, "outputs": 0}


def test_uploaded_arrays_can_be_poisoned() -> None:
    device = LateDevice(poison_uploads=True)
    array, fixed = np.arange(3), np.arange(3)
    fixed.flags.writeable = False
    (tensor, _) = device.upload(array, fixed)
    assert array.tolist() == [0, 1, 2]
    device.upload()
    assert array.tolist() == [-1, -1, -1]
    assert tensor.tolist() == fixed.tolist() == [0, 1, 2]


def test_staged_tensors_are_filled_once() -> None:
    for device in (HOST, LateDevice(poison_uploads=True)):
        staged = device.staging(2, 3)
        assert (staged.shape, staged.dtype, staged.is_contiguous()) == ((2, 3), torch.int32, True)
        staged[:] = torch.arange(6).view(2, 3)
        on_device = device.upload_staged(staged)
        device.upload(np.arange(1))
        assert on_device.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (device is HOST) == bool((staged == on_device).all())


def test_a_graph_computes_at_replay_and_overwrites_the_last_results() -> None:
    device = LateDevice(captures=True)
    given, total = torch.ones(2, 4), torch.zeros(2, 4)
    weight = torch.ones(4)
    made: list[Tensor] = []

    def body() -> None:
        total.add_(given * 2)
        made.append(TRITON_OPS.rms_norm(total, weight, 1e-6).view(8))

    graph = device.capture(body)
    assert not total.any()
    assert made[0].isnan().all()
    graph.replay()
    given[0] = 5
    download = device.download(made[0])
    graph.replay()
    assert len(made) == 1
    assert total.tolist() == [[12] * 4, [4] * 4]
    torch.testing.assert_close(made[0], torch.ones(8))
    assert (device.counts.captures, device.counts.replays) == (1, 2)
    given.fill_(-1e9)
    graph.replay()
    with pytest.raises(AssertionError, match="overwritten"):
        download.wait()
    with pytest.raises(NotImplementedError):
        LateDevice().capture(body)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda device, x: device.upload(np.arange(1)),
        lambda device, x: device.upload_into(np.zeros(1, np.float32), x),
        lambda device, x: device.download(x),
        lambda device, x: device.capture(lambda: None),
        lambda device, x: x[0].item(),
        lambda device, x: x[x > 0],
        lambda device, x: torch.tensor([1.0, 2.0]) + x,
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_operations_that_cannot_be_captured_raise(
    mistake: Callable[[LateDevice, Tensor], None], inference: bool
) -> None:
    device = LateDevice(captures=True)
    with torch.inference_mode(inference):
        x = torch.ones(2)
        with pytest.raises(RuntimeError, match="inside a capture"):
            device.capture(lambda: mistake(device, x))
        device.upload(np.arange(1))  # the capture has ended


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_cuda(captures=True) as found:
        yield found


def set_item(x: Tensor, index: object, value: object) -> Tensor:
    x[index] = value  # type: ignore[index, assignment]
    return x


def ints(x: Tensor, *values: int) -> Tensor:
    """Integers on the device of `x`, created without a wait."""
    made = torch.zeros(len(values), dtype=torch.int64, device=x.device)
    for place, value in enumerate(values):
        made[place : place + 1] = value
    return made


QUIET: list[Operation] = [
    lambda x: set_item(x, x > 1, 0.0),
    lambda x: set_item(x, ints(x, 2, 0), x[:2].clone()),
    lambda x: x * torch.tensor(2.0),
    lambda x: x.masked_fill(x > 1, -torch.inf),
    lambda x: x.repeat_interleave(ints(x, 1, 0, 2), 0, output_size=3),
    lambda x: torch.arange(3, device=x.device) * x.new_ones(3),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: x.histc(4, 0, 2),
]
"""Operations that look as if they waited, and do not."""
WAITS: list[Operation] = [
    lambda x: x[0, 0].item(),
    lambda x: x.tolist(),
    lambda x: x[: x.argmin()],
    lambda x: x.cpu(),
    lambda x: x.copy_(torch.ones(3, 4)),
    lambda x: torch.from_numpy(np.ones(3)).to(x.device, non_blocking=True),
    lambda x: torch.tensor([1.0, 2.0], device=x.device),
    lambda x: x[torch.tensor([0, 1])],
    lambda x: x[x > 1],
    lambda x: set_item(x, x > 1, torch.zeros(1, device=x.device)),
    lambda x: x.masked_fill(x > 1, x[0, 0]),
    lambda x: x.unique(),
    lambda x: x.repeat_interleave(ints(x, 1, 0, 2), 0),
    lambda x: torch.equal(x, x),
    lambda x: F.one_hot(ints(x, 1, 2)),
]
REFUSED: list[Operation] = [
    lambda x: x.numpy(),
    lambda x: x + torch.ones(4),
    lambda x: F.embedding(torch.tensor([1]), x),
    lambda x: torch.ones(4)[ints(x, 1)],
    lambda x: TRITON_OPS.rms_norm(x, torch.ones(4), 1e-6),
    lambda x: x.squeeze_(0),
]
"""Operations that a GPU rejects."""


@pytest.mark.parametrize("inference", [True, False])
def test_waits_and_mixed_devices_are_recorded(gpu: FakeGpu, inference: bool) -> None:
    values = torch.arange(12.0).view(3, 4) / 5
    with torch.inference_mode(inference):
        for operation in QUIET:
            found = operation(GpuTensor(values.clone()))
            assert isinstance(found, GpuTensor)
            torch.testing.assert_close(found.behind, operation(values.clone()))
        assert gpu.syncs == []
        for number, operation in enumerate(WAITS):
            gpu.syncs.clear()
            operation(GpuTensor(values.clone()))
            assert {sync.place.split(":")[0] for sync in gpu.syncs} == {"test_fake_device.py"}, number
        for operation in REFUSED:
            with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
                operation(GpuTensor(torch.ones(3, 4)))


def test_a_wait_names_the_line_of_batchgen(gpu: FakeGpu) -> None:
    planted = str(Path(batchgen.__file__).parent / "engine" / "planted.py")
    exec(compile("def read(x):\n\n    return x.item()", planted, "exec"), found := {})
    found["read"](GpuTensor(torch.ones(1)))
    assert [str(s) for s in gpu.syncs] == [
        "batchgen/engine/planted.py:3: aten._local_scalar_dense.default reads a number"
    ]


def test_transfers_of_the_device_do_not_wait(gpu: FakeGpu) -> None:
    device = device_for(CUDA)
    assert device is gpu.device
    ids, rows = device.upload(np.arange(4), np.ones((2, 2), np.float32))
    device.upload_into(np.arange(2) + 7, ids)
    assert [array.tolist() for array in device.download(ids * 2, rows).wait()] == [[14, 16, 4, 6], [[1, 1], [1, 1]]]
    with pytest.raises(AssertionError, match="on the host already"):
        device.download(torch.ones(1))
    pinned = torch.ones(3).pin_memory()
    assert pinned.to(CUDA, non_blocking=True).is_cuda
    assert len(gpu.copies) == 1
    assert gpu.syncs == []
    pinned.to(CUDA)
    assert len(gpu.syncs) == 1
    with pytest.raises(RuntimeError, match="inside a capture"):
        device.capture(lambda: ids.tolist())  # type: ignore[arg-type, return-value]
