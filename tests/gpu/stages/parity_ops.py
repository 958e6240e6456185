"""Every operation's kernel at real sizes, against plain PyTorch and float64 (`tests.kernels.op_cases`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.gpu.compare import judge, judge_equal, poisoned
from tests.gpu.device import Gpu
from tests.gpu.registry import Labelled, case
from tests.gpu.under_test import kernel, reference
from tests.kernels.op_cases import OPERATIONS, Operation
from tests.kernels.op_results import results


def _case(operation: Operation) -> Callable[..., Iterator[Labelled]]:
    def run(gpu: Gpu, dtype: torch.dtype, **sizes: int) -> Iterator[Labelled]:
        arguments = operation.make(gpu, dtype, **sizes)
        mine, plain = (operation.adapt(find(operation.name)) for find in (kernel, reference))
        for one in results(arguments, mine, plain, operation.exact, operation.equal, poisoned()):
            if one.exact is None:
                yield one.name, judge_equal(one.got, one.plain)
            else:
                yield one.name, judge(one.got, one.plain, one.exact, one.got.dtype)

    return run


for _operation in OPERATIONS:
    if _operation.large:
        _toys = _operation.small[: _operation.toys]
        case("parity", _operation.name, _operation.large, _toys, _operation.dtypes, _operation.name)(_case(_operation))
