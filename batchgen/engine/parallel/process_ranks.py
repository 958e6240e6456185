"""`ProcessRanks`: ranks in processes of one machine, which exchange tensors by NCCL on GPUs and by gloo on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from batchgen.errors import DeviceError
from batchgen.kernels.ranks import Ranks

c10d: Any = dist  # the groups themselves, since a process may have several engines; they have no type hints
HOST: Final = "127.0.0.1"
_TIMEOUT: Final = timedelta(minutes=30)
"""Time for which a rank waits for another one that lives: compiling kernels takes minutes."""


class ProcessRanks(Ranks):
    """One rank in this process; it exchanges with the others once it is connected."""

    _group: Any = None
    why: Callable[[DeviceError], DeviceError] = staticmethod(lambda problem: problem)
    """What is known of the end of another rank, given the error of an exchange with it."""

    def connect(self, port: int, device: torch.device) -> None:
        """Wait for the other ranks; rank 0 listens on the port.

        Raises:
            DeviceError: another rank has ended.
        """
        try:
            self.join(c10d.TCPStore(HOST, port, self.count, is_master=False, timeout=_TIMEOUT), device)
        except RuntimeError as problem:
            raise lost(problem) from problem

    def join(self, store: Any, device: torch.device) -> None:
        """Wait for the other ranks, found through a store of torch.distributed."""
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout, kind = _TIMEOUT, c10d.ProcessGroupNCCL
        else:
            options, kind = c10d.ProcessGroupGloo._Options(), c10d.ProcessGroupGloo
            options._timeout, options._devices = _TIMEOUT, [kind.create_device(hostname=HOST)]
        self._group = kind(store, self.rank, self.count, options)

    def abort(self) -> None:
        """Let an exchange with a rank that has ended fail; gloo's do that without."""
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()

    def _reduce(self, x: Tensor, how: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = how
        try:
            self._group.allreduce([x], options).wait()
        except RuntimeError as problem:
            raise self.why(lost(problem)) from problem

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.count, *x.shape)
        try:
            self._group._allgather_base(out.view(-1), x.view(-1)).wait()
        except RuntimeError as problem:
            raise self.why(lost(problem)) from problem
        return out


class LostRank(DeviceError):
    """Another rank has ended."""


def lost(problem: BaseException) -> DeviceError:
    """The error of an exchange with a rank that has ended."""
    said = (str(problem) or type(problem).__name__).splitlines()[0]
    return LostRank(f"a process of --tensor-parallel has ended ({said[:200]})")
