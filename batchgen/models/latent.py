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

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.models.lora_config import Adapter

_PROJECTION: Final = "kv_b_proj"
_SIZES: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class AbsorbedProjection(nn.Module):
    """Replacement of a layer's `kv_b_proj`, with the same weight: its two halves are applied to queries and results."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        latent, nope, rope, value = (getattr(layer, name) for name in _SIZES)
        self.weight = getattr(layer, _PROJECTION).weight
        self.heads = self.weight.shape[0] // (nope + value)
        """Heads of the layer, N."""
        self.key_dim = nope + rope
        """Size of an expanded key, Dn + R."""
        self._latent, self._nope, self._value = latent, nope, value

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
        """[1, N, T, Dn + R] -> [1, N, T, L + R]."""
        folded = torch.bmm(query[0, ..., : self._nope], self._parts()[0])  # [N, T, L]
        return torch.cat((folded, query[0, ..., self._nope :]), -1)[None]

    def expand_result(self, result: Tensor) -> Tensor:
        """Weighted sums of latents [T, N, L] -> of values [T, N, Dv]."""
        return torch.bmm(result.transpose(0, 1), self._parts()[1].transpose(1, 2)).transpose(0, 1)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """W_UK [N, Dn, L] and W_UV [N, Dv, L]."""
        weight = self.weight.view(self.heads, self._nope + self._value, self._latent)
        return weight[:, : self._nope], weight[:, self._nope :]


def store_latents(model: nn.Module, adapters: Sequence[Adapter] = ()) -> None:
    """Let the layers with multi-head latent attention store the latent, in place.

    A layer whose `kv_b_proj` an adapter changes keeps its expanded keys and values, as does every layer of a version of
    the library that does not expand them in a method of its own.
    """
    adapted = {name for adapter in adapters for name in adapter.layers}
    layers: list[tuple[str, Any]] = [(name, x) for name, x in model.named_modules() if _is_latent(x)]
    for name, layer in layers:
        if f"{name}.{_PROJECTION}" not in adapted:
            projection = AbsorbedProjection(layer)
            setattr(layer, _PROJECTION, projection)
            layer.expand_kv = projection.compressed


def absorbed_projection(layer: nn.Module) -> AbsorbedProjection | None:
    """The projection of a layer that stores the latent; None for other layers."""
    found = getattr(layer, _PROJECTION, None)
    return found if isinstance(found, AbsorbedProjection) else None


def _is_latent(layer: Any) -> bool:
    projection = getattr(layer, _PROJECTION, None)
    return (
        callable(getattr(layer, "expand_kv", None))
        and type(projection) is nn.Linear
        and projection.bias is None
        and all(isinstance(getattr(layer, name, None), int) for name in _SIZES)
    )
