"""Frequencies of a library model's rotary embeddings that depend on how long a sequence is.

The library chooses them by the longest position of a forward, so that a row depends on its neighbours, and its cached
keys on where they were computed. Here one choice holds for all rows of a job.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_KINDS = ("longrope", "dynamic")
_FACTORS = ("short_factor", "long_factor")
"""Settings of longrope up to the original context, and past it."""
_SCALES = ("short_mscale", "long_mscale")
"""Settings that a model has in their place, which then takes the short factors for all lengths."""


class _Part(NamedTuple):
    """One set of frequencies of a rotary module."""

    module: Any
    layer_type: str | None
    """Type of the layers that it is for; None: all."""
    kind: str
    settings: dict[str, Any]
    own: dict[str, Any]
    """The settings as they were given."""


def freeze_rope(model: Any) -> list[_Part]:
    """Keep the library's forwards from choosing frequencies; returns the sets that they would choose from."""
    copies: dict[int, dict[str, Any]] = {}
    parts: list[_Part] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if kind in _KINDS:
                settings = module.config.rope_parameters
                settings = settings if layer_type is None else settings[layer_type]
                parts.append(_Part(module, layer_type, kind, settings, copies.setdefault(id(settings), dict(settings))))
        if isinstance(kinds, dict):
            module.rope_type = {key: "default" if kind in _KINDS else kind for key, kind in kinds.items()}
        elif kinds in _KINDS:
            module.rope_type = "default"
    return parts


class LibraryRope:
    """The sets of frequencies of a model that depend on the longest row."""

    def __init__(self, model: Any, longest: int) -> None:
        """Take the choice from the library's forwards; `longest`: as for `fit`, until that is called."""
        self._parts = freeze_rope(model)
        self.fit(longest)

    @torch.no_grad()
    def fit(self, longest: int) -> None:
        """Choose the frequencies for sequences of at most `longest` tokens."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # the library is slow to import

        for module, layer_type, kind, settings, own in self._parts:
            if kind == "longrope":
                pair = _SCALES if _SCALES[0] in own else _FACTORS
                chosen = pair[longest > own["original_max_position_embeddings"]]
                settings.update(dict.fromkeys(pair, own[chosen]))
            prefix, options = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            current = getattr(module, f"{prefix}inv_freq")
            made, _ = ROPE_INIT_FUNCTIONS[kind](module.config, current.device, seq_len=longest, **options)
            current.copy_(made)  # in place: recorded kernels read it
