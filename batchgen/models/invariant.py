"""A model whose result for a token depends on that token and what it attends to alone, bit for bit, on a CPU.

The kernels that are compiled for the CPU compute so whatever the batch, and run models of `models.native`. For others:
libraries choose how to multiply by the number of rows, so a token's bits depend on how many there are in a step. Here
the model only ever sees tiles of a fixed number of tokens, the last filled up with tokens that mean nothing. In a
product of one shape, every row is computed in the same way; two heights of tiles may give the same bits. Tiles of a
step run one after the other: a token's keys stand in the pool when later ones attend.

Whether any of this holds on this machine for this model is found out before the first step, by running some sequences
in several arrangements.

Whatever the model is made of, it is inside: nothing here knows of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.kernels.backend import INVARIANT, Backend
from batchgen.kernels.invariant_attention import InvariantAttention
from batchgen.kernels.lora import LoraSegment, LoraStep
from batchgen.kernels.types import AttentionBatch, ChunkPages, KVPool
from batchgen.models.base import Model, ModelInput, ModelSpec, Taps, TokenEmbeds
from batchgen.models.hf import TransformersModel
from batchgen.models.native import NativeModel

__all__ = ["InvariantModel", "invariant_model"]

_HEIGHTS = (16, 64)
"""Tokens of a small and of a large tile. Multiples of 16, so that vectors begin where rows do."""
_PROBE_LENGTHS = (3, 5, 7, 9, 11, 13, 16)
"""Sequences of the check at start: 64 tokens."""
_ARRANGEMENTS = (((0, 1, 2, 3, 4, 5, 6),), ((5, 2, 6, 0, 3, 1, 4),), ((4, 6), (1, 3, 0, 5, 2)))
"""Steps of the check: the sequences of each, in their order."""


def invariant_model(model: Model, backend: Backend) -> Model:
    """The model such that a token's bits depend on nothing beside it, by the kernels of a backend that are so.

    Raises:
        UsageError: that cannot be had of this model.
    """
    if backend.name == "compiled":
        _hold(model, backend)
        return model
    if backend.product is None:
        return InvariantModel(model)
    if not isinstance(model, NativeModel):
        raise UsageError(
            f"`--deterministic` on a GPU computes by kernels of its own, and a {model.spec.name} model by the "
            "library's; leave the option out, or compute on a CPU"
        )
    return model.with_product(backend.product)


class InvariantModel:
    """A model behind the model seam, run by tiles. Its steps bring an `InvariantAttention`."""

    def __init__(self, model: Model, heights: Sequence[int] | None = None) -> None:
        """Run a model by tiles of some heights in tokens; None takes those that give the same bits here.

        Raises:
            UsageError: the model's bits depend on the batch whatever the tiles.
        """
        if isinstance(model, TransformersModel) and model.grouped:
            reason = (
                f"{model.grouped[0]} of a {model.spec.name} model multiplies by groups whose size depends on the batch"
            )
            raise UsageError(f"`--deterministic`: {reason}; leave the option out")
        self._model = model
        self._heights = _same_heights(model) if heights is None else heights

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        return self._model.spec

    def takes_embeds(self) -> bool:
        """Whether tokens may come as embeddings that are those of no id."""
        return self._model.takes_embeds()

    def recordable(self) -> bool:
        """Never: tiles are cut and joined by PyTorch."""
        return False

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, as `Model.hidden`."""
        return inputs.pick(_hidden(self._model, inputs, self._heights))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        return _logits(self._model, hidden, self._heights)


def _tiles(count: int, heights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, height): as many of the largest as are full, then the smallest that holds the rest."""
    start = 0
    while start < count:
        height = next((h for h in heights if count - start <= h), heights[-1])
        end = min(count, start + height)
        yield start, end, height
        start = end


def _hidden(model: Model, inputs: ModelInput, heights: Sequence[int]) -> Tensor:
    assert isinstance(inputs.attention, InvariantAttention)
    parts, taps = [], _TileTaps(inputs.taps)
    for start, end, height in _tiles(len(inputs.input_ids), heights):
        tile = ModelInput(
            _filled(inputs.input_ids[start:end], height),
            _filled(inputs.positions[start:end], height),
            inputs.attention.tile(start, end, height),
            taps.of(start, end, height),
            lora=_lora(inputs.lora, start, end),
            embeds=_embeds(inputs.embeds, start, end),
            ops=inputs.ops,
        )
        parts.append(model.hidden(tile)[: end - start])
        taps.keep()
    return torch.cat(parts)


def _logits(model: Model, hidden: Tensor, heights: Sequence[int]) -> Tensor:
    parts = [
        model.logits(_filled(hidden[start:end], height))[: end - start]
        for start, end, height in _tiles(len(hidden), heights)
    ]
    return torch.cat(parts) if parts else model.logits(hidden)


def _filled(values: Tensor, height: int) -> Tensor:
    """[n, ...] -> [height, ...], zeros below."""
    if len(values) == height:
        return values
    return torch.cat((values, values.new_zeros(height - len(values), *values.shape[1:])))


def _within(rows: Tensor, start: int, end: int) -> Tensor:
    """[s] int64 places in `rows` of tokens in [start, end)."""
    return ((rows >= start) & (rows < end)).nonzero().flatten()


def _lora(step: LoraStep | None, start: int, end: int) -> LoraStep | None:
    """The tile's part: rows are always named, so that tokens that fill up have no adapter."""
    if step is None:
        return None
    segments = []
    for segment in step.segments:
        if segment.rows is None:
            rows = torch.arange(end - start)
        else:
            rows = segment.rows[_within(segment.rows, start, end)] - start
        if len(rows):
            segments.append(LoraSegment(segment.adapter, rows))
    return LoraStep(tuple(segments)) if segments else None


def _embeds(embeds: TokenEmbeds | None, start: int, end: int) -> TokenEmbeds | None:
    if embeds is None:
        return None
    places = _within(embeds.rows, start, end)
    return TokenEmbeds(embeds.rows[places] - start, embeds.values[places]) if len(places) else None


class _TileTaps:
    """The taps of a step, gathered from its tiles."""

    def __init__(self, taps: Taps | None) -> None:
        self._whole = taps
        self._places = torch.empty(0, dtype=torch.int64)
        self._tile: Taps | None = None

    def of(self, start: int, end: int, height: int) -> Taps | None:
        """The taps of one tile; None where it has nothing that is wanted."""
        self._tile = None
        if self._whole is not None:
            self._places = _within(self._whole.rows, start, end)
            if len(self._places):
                rows = self._whole.rows[self._places] - start
                self._tile = Taps(rows, height, self._whole.layers, self._whole.experts)
        return self._tile

    def keep(self) -> None:
        """Take what the tile's run put into its taps."""
        tile, whole = self._tile, self._whole
        if tile is None or whole is None:
            return
        for layer, states in tile.states.items():
            if layer not in whole.states:
                whole.states[layer] = states.new_empty(len(whole.rows), states.shape[1])
            whole.states[layer][self._places] = states
        if tile.routed is not None:
            if whole.routed is None:
                whole.routed = tile.routed.new_empty(len(whole.rows), *tile.routed.shape[1:])
            whole.routed[self._places] = tile.routed


def _same_heights(model: Model) -> tuple[int, ...]:
    """The heights of tiles that give the same bits, wherever a token stands in them.

    Raises:
        UsageError: not even one height does.
    """
    found: dict[int, list[Tensor]] = {}
    for height in _HEIGHTS:
        bits = _same_bits(InvariantModel(model, (height,)), INVARIANT)
        if bits is not None:
            found[height] = bits
    if not found:
        raise _depends(model, "or try `--dtype` or `--cpu-threads 1`")
    largest = max(found)
    return tuple(height for height in found if _equal(found[height], found[largest]))


def _hold(model: Model, backend: Backend) -> None:
    """Raises: `UsageError` where kernels that should be batch-invariant are not, built by this compiler."""
    if _same_bits(model, backend) is None:
        raise _depends(model, "or try `--attention torch`")


def _depends(model: Model, other: str) -> UsageError:
    message = f"the bits of a {model.spec.name} model's logits depend on the batch here whatever is done about it"
    return UsageError(f"`--deterministic`: {message}; leave the option out, {other}")


def _same_bits(model: Model, backend: Backend) -> list[Tensor] | None:
    """What the check's sequences give in every arrangement; None where that is not the same."""
    with torch.inference_mode():
        runs = [_probe(model, backend, steps) for steps in _ARRANGEMENTS]
    return runs[0] if all(_equal(run, runs[0]) for run in runs[1:]) else None


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit, not-a-numbers included."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def _probe(model: Model, backend: Backend, steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """States [T, H] and logits [T, V] of the check's sequences, in the sequences' own order.

    Args:
        model: any.
        backend: its attention and other operations.
        steps: which sequences run together.
    """
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for step in steps:
        states = model.hidden(_probe_step(model.spec, backend, step))
        logits = model.logits(states)
        lengths = [_PROBE_LENGTHS[sequence] for sequence in step]
        pairs = zip(torch.split(states, lengths), torch.split(logits, lengths), strict=True)
        parts |= dict(zip(step, pairs, strict=True))
    return [torch.cat([parts[sequence][i] for sequence in sorted(parts)]) for i in range(2)]


def _probe_step(spec: ModelSpec, backend: Backend, step: Sequence[int]) -> ModelInput:
    """Some of the check's sequences whole, each in a page of its own; with adapters some of them go through one."""
    page = max(_PROBE_LENGTHS)
    pool = KVPool.allocate(list(spec.kv_layers), len(_PROBE_LENGTHS) + 1, page, spec.dtype, spec.device)
    batch = AttentionBatch(torch.empty(0, dtype=torch.int64))
    ids, positions, slots = [], [], []
    rows: dict[int, list[int]] = {}
    at = 0
    for sequence in step:
        length = _PROBE_LENGTHS[sequence]
        own = np.arange(length)
        ids.append(np.random.default_rng(sequence).integers(0, spec.vocab_size, length))
        positions.append(own)
        slots.append(own + (sequence + 1) * page)
        batch.chunks.append(ChunkPages(at, length, length, np.array([sequence + 1])))
        rows.setdefault(sequence % (len(spec.adapters) + 1) - 1, []).extend(range(at, at + length))
        at += length
    batch.slot_mapping = torch.from_numpy(np.concatenate(slots))
    batch.decode_start = at
    segments = tuple(LoraSegment(adapter, torch.tensor(tokens)) for adapter, tokens in rows.items() if adapter >= 0)
    return ModelInput(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(positions)),
        backend.attention(pool, batch),
        lora=LoraStep(segments) if segments else None,
        ops=backend.ops,
    )
