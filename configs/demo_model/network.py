"""Training network: a Llama on ragged batches, in bfloat16 with float32 master weights.

Shape letters: T tokens, H hidden, N heads, K kv heads, D head size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Up to this length explicit scores are faster on a CPU than fused attention, especially in the backward pass.
EXPLICIT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 2048
    hidden: int = 256
    feed_forward: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    context: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the same padded length in a flat batch: `rows * length` tokens from `start` on."""

    start: int
    rows: int
    length: int


class Block(nn.Module):
    """One layer: grouped-query attention and a gated feed-forward network, each after an RMS norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query, key_value = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.shape = shape
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.feed_forward_norm = nn.Parameter(torch.ones(shape.hidden))
        self.query = _matrix(query, shape.hidden)
        self.key = _matrix(key_value, shape.hidden)
        self.value = _matrix(key_value, shape.hidden)
        self.gate = _matrix(shape.feed_forward, shape.hidden)
        self.up = _matrix(shape.feed_forward, shape.hidden)
        # Zero-initialised: every block starts as the identity, which allows large first steps.
        self.output = nn.Parameter(torch.zeros(shape.hidden, query))
        self.down = nn.Parameter(torch.zeros(shape.hidden, shape.feed_forward))

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], groups: Sequence[Group]) -> Tensor:
        """[T, H] float32 hidden states after the layer."""
        normed = self._norm(hidden, self.attention_norm)
        hidden = hidden + functional.linear(self._attend(normed, rotation, groups), self.output.bfloat16())
        normed = self._norm(hidden, self.feed_forward_norm)
        both = functional.linear(normed, torch.cat([self.gate, self.up]).bfloat16())  # [T, 2 F]
        gate, up = both.chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self.down.bfloat16())

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.shape.hidden,), weight, self.shape.norm_eps).bfloat16()

    def _attend(self, normed: Tensor, rotation: tuple[Tensor, Tensor], groups: Sequence[Group]) -> Tensor:
        """Causal attention within each row of each group. [T, H] -> [T, N * D]."""
        shape = self.shape
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
        weights = torch.cat([self.query, self.key, self.value]).bfloat16()
        mixed = functional.linear(normed, weights).view(-1, heads + 2 * kv_heads, size)
        turning, value = torch.split(mixed, [heads + kv_heads, kv_heads], dim=1)
        query, key = torch.split(rotate(turning, rotation), [heads, kv_heads], dim=1)
        repeat = heads // kv_heads
        full = query, key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        # `split` instead of slices: the backward pass then concatenates the groups' gradients instead of adding them.
        sizes = [group.rows * group.length for group in groups]
        pieces = zip(groups, *(torch.split(tensor, sizes) for tensor in full), strict=True)
        return torch.cat([causal_attention(group, *tensors).flatten(1) for group, *tensors in pieces])


def causal_attention(group: Group, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention within the rows of a group. All tensors are [rows * length, N, D]."""
    _, heads, size = query.shape
    query, key, value = (
        part.view(group.rows, group.length, heads, size).transpose(1, 2) for part in (query, key, value)
    )
    if group.length > EXPLICIT_LENGTH:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        flat = [part.flatten(0, 1) for part in (query, key, value)]  # [rows * N, length, D]
        mask = torch.full((group.length, group.length), float("-inf"), dtype=query.dtype).triu(1)
        scores = torch.baddbmm(mask.expand(len(flat[0]), -1, -1), flat[0], flat[1].mT, alpha=size**-0.5)
        mixed = (torch.softmax(scores, dim=-1) @ flat[2]).view_as(query)
    return mixed.transpose(1, 2).flatten(0, 1)


class Network(nn.Module):
    """A Llama with tied embeddings, on flat batches of ragged rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        # The embedding has about the scale of the blocks' outputs, so that it stays visible in the residual stream. The
        # last norm starts small, so that the first logits, through the tied embedding, are below 1.
        self.embedding = nn.Parameter(0.3 * torch.randn(shape.vocabulary, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.full((shape.hidden,), shape.hidden**-0.5))
        cosine, sine = rotation_table(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def hidden(self, tokens: Tensor, groups: Sequence[Group]) -> Tensor:
        """[T, H] bfloat16: normalised last hidden states of [T] int64 token ids."""
        positions = torch.cat([torch.arange(group.length).repeat(group.rows) for group in groups])
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        rotation = cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1)  # [T, 1, D]
        # The residual stream is float32: bfloat16 would round away small contributions, and the gradients of frequent
        # tokens, which are long sums.
        hidden = functional.embedding(tokens, self.embedding)
        for block in self.blocks:
            hidden = block(hidden, rotation, groups)
        return functional.rms_norm(hidden, (self.shape.hidden,), self.norm, self.shape.norm_eps).bfloat16()

    def loss(self, tokens: Tensor, groups: Sequence[Group], targets: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean of the negative log-likelihood over the positions with a weight.

        Args:
            tokens: [T] int64 token ids.
            groups: rows of the flat batch.
            targets: [T] int64 next token of each position.
            weights: [T] float32 loss weights.
        """
        chosen = weights.nonzero().squeeze(1)
        states = self.hidden(tokens, groups)[chosen]
        logits = functional.linear(states, self.embedding.bfloat16()).float()
        losses = functional.cross_entropy(logits, targets[chosen], reduction="none")
        return (losses * weights[chosen]).sum() / weights.sum()


def rotation_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [context, D] bfloat16; both halves of D are equal."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    angles = torch.outer(torch.arange(shape.context).float(), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotate(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [T, heads, D] in Llama's layout, which pairs the two halves of D."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)
