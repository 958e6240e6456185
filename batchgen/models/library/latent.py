"""Multi-head latent attention (MLA) of library models in its absorbed form, so that the cache holds the latent.

Such a layer makes of each token a latent c [L] and a rotated key r [R], which all heads share. The library's module
expands the latents into a key and a value for each head, k = [W_UK c, r] and v = W_UV c, in one method, `expand_kv`.
Here keys stay [c, r] and values c, so there is one key head whose values are its keys' first L numbers: W_UK is folded
into the query instead, q = [W_UK^T q_nope, q_rope], and W_UV is applied to the weighted sum of latents.

The projections cost the same in both forms, and each pair of a query and a key costs 2 N (2 L + R) operations in this
one, against 2 N (Dn + R + Dv): 3.4 times as many for DeepSeek V3. Prompts are computed in this form too: another one
for tokens without a cached past would need its own attention within the step, and saves little of a prompt's
operations, most of which are products with weights.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.kernels.lora import LoraPair
from batchgen.models.library.lora import LayerAdapters

_PROJECTION: Final = "kv_b_proj"
_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class AbsorbedProjection(nn.Module):
    """Replacement of a layer's `kv_b_proj`: the two halves of its weight are applied to queries and results.

    An adapter B A of the projection has two halves too: W_UK + B_K A and W_UV + B_V A. A query's adapter is that of its
    keys, as tokens of different adapters have none in common.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        latent, nope, rope, value = (getattr(layer, name) for name in _SIZES)
        weight = getattr(layer, _PROJECTION).weight.detach()
        self.heads = weight.shape[0] // (nope + value)
        """Heads of the layer, N."""
        self.key_dim = nope + rope
        """Size of an expanded key, Dn + R."""
        self._latent, self._nope, self._value = latent, nope, value
        keys, values = self._halves(weight)
        # Copies, as products on a CPU would copy a transposed weight in every step.
        self.keys = nn.Parameter(keys.contiguous(), requires_grad=False)  # W_UK [N, Dn, L]
        self.values = nn.Parameter(values.transpose(1, 2).contiguous(), requires_grad=False)  # W_UV [N, L, Dv]
        self._adapters: LayerAdapters | None = None

    def adapt(self, adapters: LayerAdapters) -> None:
        """See `AppliesAdapters.adapt`."""
        self._adapters = adapters

    def compressed(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the place of the expanded ones.

        Args:
            latent: [1, 1, T, L].
            rope: [1, 1, T, R], rotated.

        Returns:
            keys [1, 1, T, L + R] and, as a view of them, values [1, 1, T, L].
        """
        keys = torch.cat((latent, rope), -1)
        return keys, keys[..., : self._latent]

    def fold_query(self, query: Tensor) -> Tensor:
        """[T, N, Dn + R] -> [T, N, L + R]."""
        nope = query[..., : self._nope].transpose(0, 1)  # [N, T, Dn]
        folded = torch.bmm(nope, self.keys)  # [N, T, L]
        for pair, own in self._adapted(nope):
            folded += torch.bmm(own, self._halves(pair.up)[0]) @ pair.down
        return torch.cat((folded.transpose(0, 1), query[..., self._nope :]), -1)

    def expand_result(self, result: Tensor) -> Tensor:
        """Weighted sums of latents [T, N, L] -> of values [T, N, Dv]."""
        latents = result.transpose(0, 1)  # [N, T, L]
        values = torch.bmm(latents, self.values)  # [N, T, Dv]
        for pair, own in self._adapted(latents):
            values += torch.bmm(own @ pair.down.T, self._halves(pair.up)[1].transpose(1, 2))
        return values.transpose(0, 1)

    def _halves(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """[N (Dn + Dv), x] -> [N, Dn, x], [N, Dv, x]."""
        by_head = matrix.view(self.heads, self._nope + self._value, matrix.shape[1])
        return by_head[:, : self._nope], by_head[:, self._nope :]

    def _adapted(self, x: Tensor) -> Iterator[tuple[LoraPair, Tensor]]:
        """Matrices of each adapter of the step, and x [N, T, i] with zeros for tokens without it.

        Zeros keep the shapes of products, on which the bits of a row may depend.
        """
        adapters = self._adapters
        step = None if adapters is None else adapters.visit(x.shape[1])
        if adapters is None or step is None:
            return
        for segment in step.segments:
            pair, rows = adapters.pairs[segment.adapter], segment.rows
            if pair is not None:
                yield pair, x if rows is None else torch.zeros_like(x).index_copy_(1, rows, x.index_select(1, rows))


def store_latents(model: nn.Module) -> None:
    """Let the layers with multi-head latent attention store the latent, in place."""
    layers: list[Any] = [layer for layer in model.modules() if _is_latent(layer)]
    for layer in layers:
        projection = AbsorbedProjection(layer)
        setattr(layer, _PROJECTION, projection)
        layer.expand_kv = projection.compressed


def absorbed_projection(layer: nn.Module) -> AbsorbedProjection | None:
    """The projection of a layer that stores the latent; None for other layers."""
    projection = getattr(layer, _PROJECTION, None)
    return projection if isinstance(projection, AbsorbedProjection) else None


def _is_latent(layer: Any) -> bool:
    projection = getattr(layer, _PROJECTION, None)
    return (
        callable(getattr(layer, "expand_kv", None))
        and type(projection) is nn.Linear
        and projection.bias is None
        and all(isinstance(getattr(layer, name, None), int) for name in _SIZES)
    )
