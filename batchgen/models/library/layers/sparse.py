"""Attention that selects its keys by a learned index, up to the positions where the index selects all of them.

The indexer of such a layer scores the keys before each query, one by one or in blocks, and attention sees the best ones
alone. While there are no more keys than it may select, the result is that of attention to all keys, whatever the scores
are. Up to there the layer runs without its indexer, and with no mask but the causal one.

Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from batchgen.errors import ModelError


class _EveryKey(nn.Module):
    """Replacement of an indexer, which names no keys: attention sees all of them."""

    def forward(self, *_: Any, **__: Any) -> None:
        """No keys, whatever it is called with."""


class _NoMask:
    """What a layer gets in the place of a mask, of which it takes a part for its indexer."""

    def __getitem__(self, _: Any) -> None:
        return None


NO_MASK: Final = _NoMask()


def see_every_key(decoder: nn.Module) -> int | None:
    """Replace the indexers of a decoder, in place; returns the positions up to which that changes no result.

    None: no layer has an indexer.

    Raises:
        ModelError: the number of keys that an indexer selects is not known.
    """
    layers: list[Any] = [part for part in decoder.modules() if hasattr(part, "indexer") and hasattr(part, "layer_idx")]
    limits = [_limit(layer.indexer) for layer in layers if layer.indexer is not None]
    for layer in layers if limits else ():  # one without an indexer sees what that of an earlier layer selects
        layer.indexer = _EveryKey()
        layer.register_forward_pre_hook(_replace_mask, with_kwargs=True)
    return min(limits, default=None)


def _limit(indexer: Any) -> int:
    keys = getattr(indexer, "index_topk", None)
    blocks, size = getattr(indexer, "topk_blocks", None), getattr(indexer, "block_size", None)
    if isinstance(blocks, int) and isinstance(size, int):
        keys = blocks * size
    if not isinstance(keys, int):
        raise ModelError(f"{type(indexer).__name__} selects keys in a way that is not supported. Use another model.")
    return keys


def _replace_mask(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**given, "attention_mask": NO_MASK}
