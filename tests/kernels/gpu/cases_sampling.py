"""Ahead-of-time cases of the sampling kernels: every form that the engine can choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from batchgen.kernels.gpu import filtering, noise, sampling
from batchgen.kernels.sampling import SamplingColumns

META = torch.device("meta")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and calls of launchers with meta tensors, for V with and without 16-byte alignment."""

    def ints() -> torch.Tensor:
        return torch.empty(4, dtype=torch.int64, device=META)

    def floats() -> torch.Tensor:
        return torch.empty(4, dtype=torch.float32, device=META)

    columns = SamplingColumns(floats(), ints(), floats(), floats(), ints(), None, ())
    yield "row_keys[int64]", lambda: _drop(noise.row_keys(ints(), ints(), ints()))
    for dtype in DTYPES:
        for vocab in (151_936, 50_257):
            name = f"{str(dtype).removeprefix('torch.')},V={vocab}"
            logits = torch.empty(4, vocab, dtype=dtype, device=META)
            yield f"sample[{name}]", lambda logits=logits: _drop(sampling.sample(logits, columns))  # type: ignore[misc]
            four = (columns.temperature, columns.top_k, columns.top_p, columns.min_p)
            yield (
                f"filtered_scores[{name}]",
                lambda logits=logits, four=four: _drop(filtering.filtered_scores(logits, *four, columns.top_k)),  # type: ignore[misc]
            )


def _drop(result: object) -> None:
    """Ignore the result of a launcher."""
