"""Stored tensors that a model does not read: harmless ones, by a table, and all others, which are refused.

Weights that nothing reads mean that config.json belongs to another model, or that it leaves layers out: such a model
would run, and give wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.quant_format import FULL_DTYPES
from batchgen.models.checkpoint.text_part import find_text_tensors, is_packed, unscoped

_TOWERS: Final = "towers of images, video and sound, and what joins them to the text"
UNREAD: Final[dict[str, str]] = {
    "tables of rotary embeddings, which the configuration determines": (
        r"(^|\.)(original_)?inv_freq$|(^|\.)rope\.freqs$|(^|\.)rotary\w*\.(cos|sin)_cached$"
    ),
    "masks and positions that old versions of transformers stored": (
        r"(^|\.)(attn|attention|self_attn|self_attention)\.masked_bias$|(^|\.)position_ids$"
    ),
    "scales of a quantised cache of keys and values": r"(^|\.)(q|k|v|kv|prob)_scale$|\.[kv]_proj\.output_scale$",
    "layers that draft further tokens": r"(^|\.)(mtp|mtp_\w+|eagle\w*|medusa\w*)(\.|$)",
    "heads and states of training": r"^(v_head|value_head)\.|(^|\.)(_extra_state|num_batches_tracked)$",
    _TOWERS: (
        r"(^|\.)(vision|visual|audio|image|video|speech|vit|embed_vision|embed_audio)(_\w+)?(\.|$)"
        r"|(^|\.)(multi_modal_projector|mm_projector|modality_projection|connector|aligner|talker|token2wav|code2wav)\."
    ),
}
"""What text does not read -> the names of its tensors."""
_HARMLESS: Final = re.compile("|".join(UNREAD.values()))
_MASK: Final = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention|crossattention)\.bias$")
"""Names of causal masks, and of biases: a mask has four axes, a bias has one."""
Conversion = tuple[Any, str]
"""A rule of the library that converts stored tensors, and the pattern of the rule that a name has."""
_LAYER: Final = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
_DRAFT: Final = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|mtp\w*)(\.|$)")
"""Parts that a layer has only if it drafts further tokens. Such layers follow the others under the same names."""


def tower_test(folder: ModelFolder) -> Callable[[str], bool]:
    """A test of whether a module belongs to a part of the checkpoint that reads images or sound.

    Such parts have the usual names, or are stored next to the text decoder under others.
    """

    @cache
    def others() -> frozenset[str]:
        text = find_text_tensors(folder.tensors, folder.config)
        return frozenset(unscoped(name.rpartition(".")[0]) for name in folder.tensors if not text.is_read(name))

    def test(module: str) -> bool:
        usual = re.search(UNREAD[_TOWERS], f"{module}.") is not None
        return is_packed(folder.config) and (usual or unscoped(module) in others())

    return test


def check_unread(folder: ModelFolder, unread: Iterable[str], layers: int) -> None:
    """Check that the tensors `unread`, which no module of a model of `layers` layers takes, are harmless.

    Raises:
        ModelError: the message names the first one that is not.
    """
    drafts = {_layer(name) for name in folder.tensors if _DRAFT.search(name)}
    left = [name for name in unread if not _is_harmless(folder, name, layers, drafts)]
    if not left:
        return
    beyond = [layer for name in left if (layer := _layer(name)) is not None and layer >= layers]
    if beyond:
        raise ModelError(
            f"{folder.path} holds the weights of {max(beyond) + 1} layers, and its config.json has {layers} "
            f"(num_hidden_layers): {left[0]} would not be read. Check that config.json belongs to these weights."
        )
    raise ModelError(
        f"{folder.path} holds {len(left)} tensors that a {folder.model_type} model of this config.json does not "
        f"have, {left[0]} first. Check that config.json belongs to these weights."
    )


def _is_harmless(folder: ModelFolder, name: str, layers: int, drafts: set[int | None]) -> bool:
    if _HARMLESS.search(name) or name in folder.spare:
        return True
    if _MASK.search(name) and (name not in folder.tensors or len(folder.tensors[name].shape) == 4):
        return True
    layer = _layer(name)
    return layer is not None and layer >= layers and layer in drafts


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match[3])


def check_library_tensors(
    model: Any,
    folder: ModelFolder,
    layers: int,
    renamed: Mapping[str, str] | None,
    is_left_out: Callable[[str, Any, ModelFolder], bool],
) -> None:
    """Check that a library model takes every stored tensor, with the names that the library gives it as it loads.

    Args:
        model: the model, on the meta device.
        folder: its folder.
        layers: number of its layers.
        renamed: patterns of stored names -> names in the model, before those that the library has itself.
        is_left_out: whether a stored tensor of a model and a folder belongs to a part that text does not run.

    Raises:
        ModelError: a tensor is read by no module and not harmless, or its dtype is not that of weights.
    """
    taken = model.state_dict()
    unread: dict[str, str] = {}
    """Stored name -> name in the model."""
    for name, target, _ in library_names(model, folder.tensors, renamed):
        if target not in taken:
            unread[name] = target
        elif taken[target].is_floating_point() and folder.tensors[name].dtype not in FULL_DTYPES:
            raise stored_wrongly(name, folder.tensors[name].dtype)
    left = [name for name, target in unread.items() if not is_left_out(target, model, folder)]
    check_unread(folder, [name for name in left if name not in folder.spare and not is_ignored(model, name)], layers)


def library_names(
    model: Any, names: Iterable[str], renamed: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, Conversion | None]]:
    """Stored names with those that the library gives them as it loads, and how it converts the values, if it does.

    Args:
        model: the model, which may lack the parameter.
        names: the stored names.
        renamed: patterns of stored names -> names in the model, before those that the library has itself.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model, None if renamed is None else dict(renamed))
    taken = model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    for name in sorted(names, key=dot_natural_key):  # the order of the library, whose rules keep state
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, taken)
        if target not in taken and name in taken:
            target, pattern = name, None
        yield name, target, None if pattern is None else (by_pattern[pattern], pattern)


def is_ignored(model: Any, name: str) -> bool:
    """Whether the library's class itself names a tensor as one that it does not read."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def stored_wrongly(name: str, dtype: str) -> ModelError:
    """The error of a weight whose stored dtype nothing explains."""
    return ModelError(
        f"{name} is stored as {dtype}, which is not supported: nothing in the folder says how it was quantised. "
        "Use the unquantised checkpoint."
    )
