"""The library's configuration of a folder, and the text part of its classes that pack more: which class, which modules
text runs, which tensors.

Where the nested text decoder is a causal language model of the library, that class alone is built, and the stored names
are mapped to its own. Otherwise the library's class for the whole checkpoint is built, on the meta device, and every
module that text does not run is removed before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from functools import partial
from typing import Any, Final

from torch import nn

from batchgen.errors import ModelError, library_errors
from batchgen.models.architectures import runs_alone
from batchgen.models.checkpoint.context import Contexts, contexts_of
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.text_part import TextTensors, find_text_tensors, is_packed, text_config

_UNREAD: Final = "batchgen_unread"
_RECURRENT_CONTEXT: Final = 1 << 20
"""Context of a model that names none, whose layers are recurrent or have a window: they remember as much after any."""


def read_transformers_config(folder: ModelFolder, context_length: int | None) -> tuple[Any, int]:
    """Read the library's configuration, and the context length.

    Raises:
        ModelError: the library cannot read it, or the requested context is longer than the model's.
    """
    with _guard(folder):
        config = _library_config(folder)
    unset_quantisation(config)
    text = decoder_config(config)
    contexts = library_contexts(text, context_length)
    if contexts is None:
        raise ModelError(f"The configuration of {folder.path} names no context length. Give --max-model-len.")
    context = contexts.chosen(context_length)
    _check_rope(text)
    return config, context


def unset_quantisation(config: Any) -> None:
    """Make it the configuration of the plain model: quantised weights are dequantised before the library has them."""
    for holder in (config, config.get_text_config()):
        if getattr(holder, "quantization_config", None) is not None:
            del holder.quantization_config


def library_contexts(config: Any, requested: int | None = None) -> Contexts | None:
    """Contexts of a text decoder: the one requested if its configuration names none, None without either."""
    longest: Any = getattr(config, "max_position_embeddings", None) or requested
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if longest is None and "linear_attention" in kinds <= {"linear_attention", "sliding_attention"}:
        longest = _RECURRENT_CONTEXT
    if longest is None:
        return None
    settings = rope_settings(config)
    if len(settings) != 1:  # one per layer type: the longest is that of the configuration
        return Contexts(int(longest), int(longest), can_scale=False)
    original = getattr(config, "original_max_position_embeddings", None)
    return contexts_of(str(config.model_type), int(longest), settings[0], original)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Rope settings of the configuration: one dict, or one per layer type."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        return []
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def _check_rope(config: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for settings in rope_settings(config):
        kind = settings.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise ModelError(f"config.json: rope type {kind!r} is not supported. Supported: {known}.")


def _library_config(folder: ModelFolder) -> Any:
    """The library's configuration of the class to build: of the text decoder alone where that is a causal model."""
    from transformers import CONFIG_MAPPING, AutoConfig  # the library takes seconds to import

    alone = text_runs_alone(folder)
    config = whole_config(folder) if folder.model_type in CONFIG_MAPPING or not alone else None
    if not alone:
        thinker = getattr(config, "thinker_config", None)  # of a class whose other parts speak
        return config if thinker is None else thinker
    text = dict(text_config(folder.config))
    config = AutoConfig.for_model(**text) if config is None else decoder_config(config)
    head = f"{find_text_tensors(folder.tensors, folder.config).head}lm_head."
    config.tie_word_embeddings = text["tie_word_embeddings"] and not any(n.startswith(head) for n in folder.tensors)
    return config


def whole_config(folder: ModelFolder) -> Any:
    """The library's configuration of a folder, of the type that `folder` names: the folder may name it otherwise."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # as in _library_config

    values: Any = dict(folder.config)
    with _guard(folder):
        if not folder.is_gguf:  # the library's reader knows more values than JSON does
            values, _ = PreTrainedConfig.get_config_dict(folder.path, local_files_only=True)
            values = folder.overrides.merged(values)
        return CONFIG_MAPPING[folder.model_type].from_dict({**deepcopy(values), "model_type": folder.model_type})


def _guard(folder: ModelFolder) -> AbstractContextManager[None]:
    source = folder.path if folder.is_gguf else folder.path / "config.json"
    return library_errors(f"transformers cannot read {source}")


def text_runs_alone(folder: ModelFolder) -> bool:
    """See `runs_alone`."""
    return runs_alone(folder.config, folder.tensors)


def decoder_config(config: Any) -> Any:
    """The part of a library configuration that describes the text decoder."""
    return config.get_text_config(decoder=True)


def library_class(config: Any) -> Any:
    """The library's class for a configuration: one that reads images or audio too, or a causal one.

    Raises:
        ModelError: the library has none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM  # as in _library_config

    for auto in (AutoModelForMultimodalLM, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            cls = auto._model_mapping[type(config)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise ModelError(f"The installed transformers has no class for {config.model_type} that writes text.")


def causal_part(model: Any) -> Any:
    """The innermost model that contains the language head: the model itself, or the one inside it that writes text.

    Raises:
        ModelError: there is none.
    """
    from transformers import PreTrainedModel  # as in _library_config

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    head = next((head for part in parts if (head := part.get_output_embeddings()) is not None), None)
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language head. Use a checkpoint with a language head.")
    return [part for part in parts if head in set(part.modules())][-1]


def decoder_name(model: Any) -> str | None:
    """Attribute name of a causal language model's decoder; None if it has none."""
    from transformers import PreTrainedModel  # as in _library_config

    if isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        return str(model.base_model_prefix)
    return next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), None)


def feature_blocks(config: Any) -> tuple[int, ...]:
    """Blocks in front of which a decoder adds features, where its configuration chooses them; empty for others."""
    if config.model_type != "granite4_vision":
        return ()
    return tuple(dict.fromkeys((*(block for _, block in config.deepstack_layer_map), *config.spatial_target_layers)))


def text_decoder(part: Any) -> Any:
    """The module of a causal part that maps token ids to states; None if it has none."""
    name = decoder_name(part)
    base = None if name is None else getattr(part, name)
    if base is None or decoder_config(base.config) is base.config:
        return base
    return part.get_decoder()  # `base` runs towers too


def unread_modules(model: nn.Module, run: Callable[[], None]) -> list[str]:
    """Names of the outermost modules with parameters that `run`, a run of text, does not call.

    Blocks and other listed modules are kept whole if they are called: experts run for some tokens only.
    """
    called: set[nn.Module] = set()
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, _: called.add(module)).remove)
        run()

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if not any(True for _ in child.parameters()):
                continue
            if called.isdisjoint(child.modules()):
                yield prefix + name
            elif not isinstance(module, nn.ModuleList):
                yield from walk(child, f"{prefix}{name}.")

    return list(walk(model, ""))


def skipped_blocks(decoder: nn.Module) -> int:
    """Number of the decoder's blocks that `remove_modules` removed, such as those that attend to images alone."""
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return sum(block is None for module in lists for block in module._modules.values())


def without_modules(cls: Any, unread: Sequence[str]) -> Any:
    """A class of the same name whose instances lack the named modules, so that their weights are not read."""
    return changed_class(cls, partial(remove_modules, unread=unread), {_UNREAD: tuple(unread)})


def changed_class(cls: Any, change: Callable[[Any], None], attributes: Mapping[str, Any] = {}) -> Any:
    """A class of the same name, with more attributes, whose instances are changed as soon as they are built."""

    def build(self: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, *args, **options)
        change(self)

    return type(cls.__name__, (cls,), {"__init__": build, "__module__": cls.__module__, **attributes})


def remove_modules(model: Any, unread: Sequence[str]) -> None:
    """Set the named modules of a model to None, and number the remaining layers without gaps."""
    for name in unread:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._modules[attribute] = None
    layered = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    order = {index: place for place, index in enumerate(sorted({module.layer_idx for module in layered}))}
    for module in layered:
        module.layer_idx = order[module.layer_idx]
    gone = tuple(f"{name}." for name in unread)
    for table in ("all_tied_weights_keys", "_tied_weights_keys"):
        tied = getattr(model, table, None)
        if isinstance(tied, dict):
            setattr(model, table, {k: v for k, v in tied.items() if not k.startswith(gone) and not v.startswith(gone)})


def renamed_keys(model: Any, folder: ModelFolder) -> dict[str, str]:
    """Patterns of stored names -> names in `model`, a causal language model whose checkpoint packs more."""
    stored = _stored(model, folder)
    inner = f"{model.base_model_prefix}."
    pairs = {stored.decoder: inner, f"{stored.head}lm_head.": "lm_head."}
    return {f"^{re.escape(old)}": new for old, new in pairs.items() if old != new}


def is_unread(name: str, model: Any, folder: ModelFolder) -> bool:
    """Whether a stored tensor, named as stored or as in `model`, belongs to a part that text does not run.

    Args:
        name: name of the tensor, such as one that the library did not expect.
        model: the loaded model, of the class that `without_modules` made.
        folder: the checkpoint.
    """
    if not is_packed(folder.config):
        return False
    base = f"{model.base_model_prefix}."
    if text_runs_alone(folder):
        renamed = name not in folder.tensors and name.startswith(base)
        return not (renamed or _stored(model, folder).is_read(name))
    unread = tuple(f"{part.removeprefix(base)}." for part in getattr(model, _UNREAD, ()))
    kept = {id(module): path for path, module in model.named_modules()}
    part = causal_part(model)
    scopes = tuple(
        f"{kept[id(module)]}.".removeprefix(base) for module in (text_decoder(part), part.get_output_embeddings())
    )
    inner = name.removeprefix(base)
    return inner.startswith(unread) or not (inner.startswith(scopes) or f"{base}".startswith(scopes))


def _stored(model: Any, folder: ModelFolder) -> TextTensors:
    names = {id(value): name for name, value in model.named_parameters()}
    embedding = names[id(model.get_input_embeddings().weight)].removeprefix(f"{model.base_model_prefix}.")
    return find_text_tensors(folder.tensors, folder.config, embedding)
