"""Batch-invariant models: the result of a token depends, bit for bit, only on the token and on what it attends to.

The compiled CPU kernels, which run native models, are batch-invariant. Other libraries choose a matrix multiplication
by the number of rows, so a token's bits depend on the number of tokens in the step. `DeterministicModel` therefore runs
the model on tiles of a fixed number of tokens and pads the last tile: in products of one shape every row is computed in
the same way. Tiles of a step run in order, so a token's keys are stored before later tokens attend to them.

Before the first step, the model runs some sequences in several arrangements to verify that their bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.kernels.attention.spans import SpanAttention
from batchgen.kernels.attention.torch_attention import TorchAttention, product_heights
from batchgen.kernels.backend import DETERMINISTIC, Backend
from batchgen.kernels.cpu.library import DTYPES, loaded, missing
from batchgen.kernels.device import HOST
from batchgen.kernels.grouped import GroupedAttention
from batchgen.kernels.lora import LoraSegment, LoraStep
from batchgen.kernels.mixers.states import PooledStates, Run, StatePool, chunk_batches
from batchgen.kernels.types import AttentionBatch, ChunkPages, KVPool
from batchgen.models.base import CaptureSpec, Model, ModelInput, ModelSpec, TokenEmbeds
from batchgen.models.library.model import TransformersModel
from batchgen.models.native.decoder import NativeModel

_TILE_SIZES = (16, 64)
"""Number of tokens of a small and of a large tile; multiples of 16, so that rows align with vectors."""
_PROBE_LENGTHS = (3, 5, 7, 9, 11, 13, 16)
"""Lengths of the check's sequences, 64 tokens in total."""
_ARRANGEMENTS = (((0, 1, 2, 3, 4, 5, 6),), ((5, 2, 6, 0, 3, 1, 4),), ((4, 6), (1, 3, 0, 5, 2)))
"""Arrangements of the check: the sequences of each step, in order."""


def deterministic_model(model: Model, backend: Backend) -> Model:
    """Make a model batch-invariant on a backend with deterministic kernels.

    Raises:
        UsageError: not possible for this model.
    """
    if not model.spec.plain_adapters:
        raise UsageError(
            "`--deterministic`: an adapter (--lora) changes more than linear layers, and such products depend on the "
            "batch; leave the option out, or merge the adapter into the model"
        )
    if model.spec.states and not (loaded() and model.spec.dtype in DTYPES):
        reason = missing() or f"they do not compute {str(model.spec.dtype).removeprefix('torch.')}"
        raise UsageError(
            f"`--deterministic`: the recurrent layers of a {model.spec.name} model need compiled kernels ({reason}); "
            "leave the option out"
        )
    if backend.name == "compiled":
        if _probe_bits(model, backend) is None:
            raise _batch_dependent(model, "or try `--attention torch`")
        return model
    if backend.ops.linear is None:
        return DeterministicModel(model)
    if not isinstance(model, NativeModel):
        raise UsageError(
            f"`--deterministic` on a GPU needs batchgen's own kernels, but transformers computes a {model.spec.name} "
            "model; leave the option out, or compute on a CPU"
        )
    return model.with_product(backend.ops.linear)


class DeterministicModel:
    """A model that runs on tiles of fixed sizes; its steps use `TorchAttention`."""

    def __init__(self, model: Model, tile_sizes: Sequence[int] | None = None) -> None:
        """Wrap a model; `tile_sizes` are numbers of tokens, None selects those that give equal bits on this machine.

        Raises:
            UsageError: the model's bits depend on the batch with every tile size.
        """
        if isinstance(model, TransformersModel) and model.library_experts:
            reason = (
                f"{model.library_experts[0]} of a {model.spec.name} model multiplies in groups whose size depends on "
                "the batch"
            )
            raise UsageError(f"`--deterministic`: {reason}; leave the option out")
        threads = torch.get_num_threads()
        for layer in dict.fromkeys(model.spec.attention_layers):
            group = max(1, model.spec.num_heads // layer.kv_heads)
            if not product_heights(group, layer.key_dim, layer.value_dim, threads).invariant:
                raise _batch_dependent(model, "or try `--cpu-threads 1`")
        self._model = model
        self.stream = model.stream
        self._tile_sizes = _consistent_tile_sizes(model) if tile_sizes is None else tile_sizes

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        return self._model.spec

    def accepts_embeds(self) -> bool:
        """Whether tokens may come as embeddings that are those of no id."""
        return self._model.accepts_embeds()

    def fit_positions(self, longest: int) -> None:
        """See `Model.fit_positions`."""
        self._model.fit_positions(longest)

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, as `Model.hidden`."""
        assert isinstance(inputs.attention, TorchAttention | GroupedAttention | SpanAttention)
        assert isinstance(inputs.states, PooledStates | None)
        parts, capture, axes = [], _TileCapture(inputs.capture), inputs.rope_positions
        for start, end, tile_size in _tiles_around(inputs.attention.spans, len(inputs.input_ids), self._tile_sizes):
            tile = ModelInput(
                _padded(inputs.input_ids[start:end], tile_size),
                _padded(inputs.positions[start:end], tile_size),
                inputs.attention.tile(start, end, tile_size),
                capture.of_tile(start, end, tile_size),
                lora=_tile_lora(inputs.lora, start, end),
                embeds=_tile_embeds(inputs.embeds, start, end),
                rope_positions=None if axes is None else F.pad(axes[:, start:end], (0, tile_size - (end - start))),
                ops=inputs.ops,
                states=None if inputs.states is None else inputs.states.tile(start, end),
            )
            parts.append(self._model.hidden(tile)[: end - start])
            capture.collect()
        return inputs.select(torch.cat(parts))

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        """See `Model.logits`."""
        parts = []
        for start, end, tile_size in _tiles(len(hidden), self._tile_sizes):
            own = None if adapters is None else F.pad(adapters[start:end], (0, tile_size - (end - start)), value=-1)
            parts.append(self._model.logits(_padded(hidden[start:end], tile_size), own)[: end - start])
        return torch.cat(parts) if parts else self._model.logits(hidden)


def _tiles(count: int, tile_sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, tile size) of each tile: full tiles of the largest size, then the smallest that holds the rest."""
    start = 0
    while start < count:
        tile_size = next((h for h in tile_sizes if count - start <= h), tile_sizes[-1])
        end = min(count, start + tile_size)
        yield start, end, tile_size
        start = end


def _tiles_around(
    spans: Sequence[tuple[int, int]], count: int, tile_sizes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """`_tiles` of the tokens between runs that see one another, and one tile for each run."""
    at = 0
    for begin, end in [*sorted(spans), (count, count)]:
        yield from ((at + low, at + high, size) for low, high, size in _tiles(begin - at, tile_sizes))
        if begin < end:
            yield begin, end, -(-(end - begin) // tile_sizes[0]) * tile_sizes[0]
        at = end


def _padded(values: Tensor, tile_size: int) -> Tensor:
    """[n, ...] -> [tile_size, ...], padded with zeros."""
    if len(values) == tile_size:
        return values
    return torch.cat((values, values.new_zeros(tile_size - len(values), *values.shape[1:])))


def _within(rows: Tensor, start: int, end: int) -> Tensor:
    """[s] int64 indices of the elements of `rows` in [start, end)."""
    return ((rows >= start) & (rows < end)).nonzero().flatten()


def _tile_lora(step: LoraStep | None, start: int, end: int) -> LoraStep | None:
    """The LoRA segments of a tile; their rows are always explicit, so that padding uses no adapter."""
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


def _tile_embeds(embeds: TokenEmbeds | None, start: int, end: int) -> TokenEmbeds | None:
    if embeds is None:
        return None
    places = _within(embeds.rows, start, end)
    return TokenEmbeds(embeds.rows[places] - start, embeds.values[places]) if len(places) else None


class _TileCapture:
    """Captures of a step, collected from its tiles."""

    def __init__(self, capture: CaptureSpec | None) -> None:
        self._step = capture
        self._places = torch.empty(0, dtype=torch.int64)
        self._tile: CaptureSpec | None = None

    def of_tile(self, start: int, end: int, tile_size: int) -> CaptureSpec | None:
        """Capture of one tile; None if none of its tokens is captured."""
        self._tile = None
        if self._step is not None:
            self._places = _within(self._step.rows, start, end)
            if len(self._places):
                rows = self._step.rows[self._places] - start
                self._tile = CaptureSpec(rows, tile_size, self._step.layers, self._step.experts)
        return self._tile

    def collect(self) -> None:
        """Copy the captures of the last tile into those of the step."""
        tile, whole = self._tile, self._step
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


def _consistent_tile_sizes(model: Model) -> tuple[int, ...]:
    """Tile sizes that give the same bits at every position in a tile.

    Raises:
        UsageError: no tile size does.
    """
    bits_by_size: dict[int, list[Tensor]] = {}
    for tile_size in _TILE_SIZES:
        bits = _probe_bits(DeterministicModel(model, (tile_size,)), DETERMINISTIC)
        if bits is not None:
            bits_by_size[tile_size] = bits
    if not bits_by_size:
        raise _batch_dependent(model, "or try `--dtype` or `--cpu-threads 1`")
    largest = max(bits_by_size)
    return tuple(tile_size for tile_size in bits_by_size if _equal(bits_by_size[tile_size], bits_by_size[largest]))


def _batch_dependent(model: Model, other: str) -> UsageError:
    message = f"the bits of a {model.spec.name} model's logits depend on the batch on this machine"
    return UsageError(f"`--deterministic`: {message}; leave the option out, {other}")


def _probe_bits(model: Model, backend: Backend) -> list[Tensor] | None:
    """States and logits of the check's sequences if they are equal in every arrangement, else None."""
    with torch.inference_mode():
        runs = [_probe(model, backend, steps) for steps in _ARRANGEMENTS]
    return runs[0] if all(_equal(run, runs[0]) for run in runs[1:]) else None


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit, including NaNs."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def _probe(model: Model, backend: Backend, steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """States [T, H] and logits [T, V] of the check's sequences, in the order of the sequences.

    Args:
        model: any model.
        backend: attention and other operations.
        steps: the sequences of each step.
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
    """A step that computes some of the check's sequences, one page each; adapters, if any, are spread over them."""
    page = max(_PROBE_LENGTHS)
    pool = KVPool.allocate(list(spec.kv_layers), len(_PROBE_LENGTHS) + 1, page, spec.kv_dtype, spec.device)
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
    states = StatePool.allocate(spec.states, len(_PROBE_LENGTHS) + 1, spec.dtype, spec.device)
    ends = np.cumsum([_PROBE_LENGTHS[sequence] for sequence in step]).tolist()
    starts = zip(step, [0, *ends], ends, strict=False)
    runs = chunk_batches([[Run(start, end, 0, sequence + 1)] for sequence, start, end in starts], HOST)
    segments = tuple(LoraSegment(adapter, torch.tensor(tokens)) for adapter, tokens in rows.items() if adapter >= 0)
    return ModelInput(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(positions)),
        backend.attention(pool, batch),
        lora=LoraStep(segments) if segments else None,
        ops=backend.ops,
        states=PooledStates(states, runs) if spec.states else None,
    )
