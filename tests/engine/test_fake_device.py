"""`LateDevice` detects mistakes: each one is planted here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from batchgen.kernels.device import HOST, Device, as_array
from batchgen.kernels.gpu.ops import TRITON_OPS
from tests.engine.fake_device import LateDevice, LateDownload, Wait


def test_uploads_are_packed_copies() -> None:
    device: Device = LateDevice()
    arrays = [np.arange(3), np.array([True]), np.empty((0, 4), np.float32), np.arange(6, dtype=np.uint16).reshape(2, 3)]
    tensors = device.upload(*arrays)
    assert [as_array(t).tolist() for t in tensors] == [a.tolist() for a in arrays]
    assert [t.dtype for t in tensors] == [HOST.upload(a)[0].dtype for a in arrays]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    arrays[0][:] = 7
    assert tensors[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("array", "target"),
    [
        (np.arange(3), torch.zeros(2, dtype=torch.int64)),
        (np.arange(2), torch.zeros(2)),
        (np.arange(2), torch.zeros(4, dtype=torch.int64)[::2]),
        (np.zeros((1, 2)), torch.zeros(1, 2, dtype=torch.float64)),
    ],
)
def test_upload_into_rejects_wrong_arrays(array: np.ndarray, target: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        LateDevice().upload_into(array, target)


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
    found = download.wait()
    assert [array.tolist() for array in found] == [[1, 1], [1], as_array(sources[2]).tolist()]
    sources[0].zero_()
    assert [array.tolist() for array in download.wait()[:2]] == [[1, 1], [1]]
    assert len(device.counts.waits) == 1


def test_an_overwritten_source_raises() -> None:
    source = torch.ones(2)
    download = LateDevice().download(source)
    source.add_(1)
    with pytest.raises(AssertionError, match="tensor 0 of a download was overwritten"):
        download.wait()


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
    assert device.counts.lateness() == {0: 1, 1: 1}
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


def test_a_graph_computes_at_replay_and_runs_no_python() -> None:
    device = LateDevice(captures=True)
    given, total = torch.ones(2), torch.zeros(2)
    made: list[torch.Tensor] = []

    def body() -> None:
        doubled = given * 2
        total.add_(doubled)
        made.append(doubled.view(2, 1))

    graph = device.capture(body)
    assert total.tolist() == [0, 0]
    assert made[0].isnan().all()
    graph.replay()
    given.fill_(5)
    graph.replay()
    assert len(made) == 1
    assert made[0].tolist() == [[10], [10]]
    assert total.tolist() == [12, 12]
    assert (device.counts.captures, device.counts.replays) == (1, 2)


def test_a_graph_contains_kernels() -> None:
    device = LateDevice(captures=True)
    x, weight = torch.randn(3, 16), torch.randn(16)
    out: list[torch.Tensor] = []
    graph = device.capture(
        lambda: out.append(TRITON_OPS.add_rms_norm(x, weight.expand(3, 16).contiguous(), weight, 1e-6))
    )
    assert out[0].isnan().all()
    fresh = torch.randn(3, 16)
    x.copy_(fresh)
    graph.replay()
    torch.testing.assert_close(x, fresh + weight)
    torch.testing.assert_close(out[0], torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))


def test_a_replay_overwrites_the_last_results() -> None:
    device = LateDevice(captures=True)
    given = torch.ones(2)
    made: list[torch.Tensor] = []
    graph = device.capture(lambda: made.append(given + 1))
    graph.replay()
    download = device.download(made[0])
    given.fill_(9)
    graph.replay()
    with pytest.raises(AssertionError, match="overwritten"):
        download.wait()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda device, x: device.upload(np.arange(1)),
        lambda device, x: device.upload_into(np.zeros(1, np.float32), x),
        lambda device, x: device.download(x),
        lambda device, x: device.capture(lambda: None),
        lambda device, x: x[0].item(),
        lambda device, x: bool(x[0] > 0),
        lambda device, x: x[x > 0],
        lambda device, x: x.nonzero(),
        lambda device, x: x.repeat_interleave(torch.tensor([1, 2])),
        lambda device, x: x.masked_select(x > 0),
        lambda device, x: x.unique(),
        lambda device, x: torch.tensor([1.0, 2.0]) + x,
    ],
)
def test_operations_that_cannot_be_captured_raise(mistake: Callable[[LateDevice, torch.Tensor], object]) -> None:
    device = LateDevice(captures=True)
    for inference in (True, False):
        with torch.inference_mode(inference):
            x = torch.ones(2)
            with pytest.raises(RuntimeError, match="inside a capture"):
                device.capture(lambda: mistake(device, x))  # type: ignore[arg-type, return-value] # noqa: B023
            device.upload(np.arange(1))  # the capture has ended


def test_a_device_without_graphs_cannot_capture() -> None:
    with pytest.raises(NotImplementedError):
        LateDevice().capture(lambda: None)
