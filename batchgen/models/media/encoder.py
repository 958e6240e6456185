"""The towers of a checkpoint: images and audio in, features in the place of token embeddings out.

The library's own class joins features and text. Here its text decoder is replaced by a double without weights that
keeps what it is given: the features of a prompt that has one item alone, as the decoder would read them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from batchgen.errors import ModelError, first_line
from batchgen.models.base import ModelSpec
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.stored_tensors import library_names
from batchgen.models.checkpoint.text_part import unscoped
from batchgen.models.checkpoint.weights import LazyWeight, WeightReader
from batchgen.models.library.load import library_model
from batchgen.models.library.media_config import media_config
from batchgen.models.library.meta import meta_model
from batchgen.models.library.model import silence_library
from batchgen.models.library.text import causal_part, library_class, text_decoder
from batchgen.models.lora.adapters import adapter_reader, read_tensor
from batchgen.models.lora.config import Adapter
from batchgen.models.media.processor import PreparedItem
from batchgen.request.fields.media import MediaKind

_TYPE_IDS: Final[dict[MediaKind, int]] = {"image": 1, "audio": 3}
"""What the library calls the kinds of tokens; text is 0."""
_KNOWN: Final = frozenset((
    "inputs_embeds", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep", "cache_position",
    "per_layer_inputs", "visual_pos_masks", "deepstack_visual_embeds", "output_attentions", "output_hidden_states",
    "output_router_logits", "vision_mask", "deepstack_features",
))  # fmt: skip
"""What a class may give its text decoder: `Model` computes the same, or it has no effect on one prompt."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SPEAKS = re.compile(r"(^|\.)(talker|token2wav|code2wav)\.")
"""Names of modules that make sounds of a text, which no text depends on."""


class MediaEncoder:
    """Towers of a model, and rotary positions of its prompts; created by `load_media_encoder`.

    Raises:
        ModelError: an adapter of `spec` changes the towers in a way that is not supported.
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._model = model
        self._joined = _joining_part(model)
        self._spec = spec
        self._names = set(_parameters(self._joined.forward))
        scope = next(f"{name}." for name, module in model.named_modules() if module is self._joined).lstrip(".")
        self._adapted: dict[int | None, dict[str, Tensor]] = {None: {}}
        """Index of an adapter -> parameters of the joining part in place of the model's"""
        for index, adapter in enumerate(spec.tower_adapters):
            changed = {} if adapter is None else _adapted_parameters(adapter, model)
            self._adapted[index] = {name.removeprefix(scope): value for name, value in changed.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, with those of adapters."""
        adapted = (value for changed in self._adapted.values() for value in changed.values())
        return sum(parameter.nbytes for parameter in (*self._model.parameters(), *adapted))

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Features [F, W] of each item, in the model's dtype and on its device; W is `ModelSpec.features_size`.

        Args:
            items: of equal `PreparedItem.shape`, which are computed together.

        Raises:
            ModelError: the towers do not give one feature for each placeholder.
        """
        first, device = items[0], self._spec.device
        assert all(item.shape == first.shape for item in items), "items of one shape"
        joined = {
            name: torch.cat([item.tensors[name] for item in items]) for name in first.tensors if name in self._names
        }
        tensors = {
            name: value.to(device, self._spec.dtype if value.is_floating_point() else None)
            for name, value in joined.items()
        }
        count = first.features
        ids = torch.full((len(items), count), first.token_id, device=device)
        if first.last_id is not None:
            ids[:, -1] = first.last_id
        at = torch.arange(count, device=device).expand(len(items), count)
        inputs = self._reach(first, input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=at, **tensors)
        return list(self._features(inputs, len(items), count).unbind())

    def _reach(self, item: PreparedItem, **inputs: Tensor) -> Mapping[str, Any]:
        """Inputs of the text decoder, as the library's class computes them."""
        try:
            # Convolutions of float32 would be rounded on a GPU, and may differ from run to run.
            with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                if changed := self._adapted[item.adapter]:
                    functional_call(self._joined, changed, (), {"use_cache": False, **inputs})
                else:
                    self._joined(use_cache=False, **inputs)
        except _Reached as reached:
            return reached.inputs
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"The towers of this {self._spec.name} model cannot encode an item of {item.kind} that becomes "
                f"{item.features} tokens: {first_line(error)}."
            ) from None
        raise ModelError(f"The class of this {self._spec.name} model does not give features to its decoder.")

    def _features(self, inputs: Mapping[str, Any], items: int, count: int) -> Tensor:
        """[items, count, W] of what the double was given.

        Raises:
            ModelError: the decoder reads more than embeddings and what is added to its blocks.
        """
        more = [name for name, value in inputs.items() if value is not None and name not in _KNOWN]
        if more:
            raise ModelError(
                f"The class of this {self._spec.name} model gives its decoder {more[0]} in addition to features, "
                "which is not supported. Leave out images and audio."
            )
        levels = list(inputs.get("deepstack_visual_embeds") or (inputs.get("deepstack_features") or {}).values())
        if len(levels) not in (0, self._spec.deepstack):
            raise ModelError(
                f"The class of this {self._spec.name} model adds features to {len(levels)} blocks, and its "
                f"configuration names {self._spec.deepstack}. Leave out images and audio."
            )
        states = inputs["inputs_embeds"]
        parts = [states, *(level.view(items, count, -1) for level in levels)]
        parts += [torch.zeros_like(states)] * (1 + self._spec.deepstack - len(parts))  # of audio
        return torch.cat(parts, dim=-1).to(self._spec.dtype)

    @torch.no_grad()
    def positions(self, ids: Tensor, layouts: Sequence[Mapping[str, npt.NDArray[np.int64]]]) -> tuple[Tensor, int]:
        """Rotary positions of a prompt, and that of the first token after it.

        Args:
            ids: [P] int64 token ids, with those of placeholders.
            layouts: `Expansion.layout` of each item, in the order of the prompt.

        Returns:
            [A, P] int64 on the CPU, and the position on every axis of the first new token.
        """
        assert self._spec.rope_axes, "only of models with several axes"
        owner = next(part for part in (self._model, self._joined) if hasattr(part, "get_rope_index"))
        names = _parameters(owner.get_rope_index)
        gathered: dict[str, list[Tensor]] = {}
        for layout in layouts:
            for name, values in layout.items():
                if name in names:
                    gathered.setdefault(name, []).append(torch.from_numpy(values))
        options = {name: torch.cat(parts) for name, parts in gathered.items()}
        row = ids[None].cpu()
        if "mm_token_type_ids" in names:
            options["mm_token_type_ids"] = self._type_ids(row)
        rotary, delta = owner.get_rope_index(row, attention_mask=torch.ones_like(row), **options)
        return rotary[:, 0].to(torch.int64), len(ids) + int(delta.flatten()[0])

    def _type_ids(self, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        for kind, number in _TYPE_IDS.items():
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token = getattr(self._model.config, name, None)
                if token is not None:
                    types[ids == token] = number
        return types


class _Reached(Exception):
    """Ends a forward of the library where it would run the text decoder."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _ZeroEmbedding(nn.Module):
    """Embedding of any id to zeros, so that only features are not zero."""

    def __init__(self, like: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._size = like.weight.shape
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """[V, E] zeros that take the memory of one."""
        return torch.zeros((), dtype=self._dtype).expand(self._size)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        return torch.zeros(*ids.shape, self._size[1], dtype=self._dtype, device=ids.device)


class _DecoderDouble(nn.Module):
    """Double of a text decoder, without weights, that ends the forward with what it is given."""

    def __init__(self, replaced: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = replaced.config
        self.dtype = dtype
        self.embed_tokens = _ZeroEmbedding(replaced.get_input_embeddings(), dtype)

    def get_input_embeddings(self) -> nn.Module:
        """An embedding to zeros."""
        return self.embed_tokens

    def get_per_layer_inputs(self, *_: Any, **__: Any) -> None:
        """None: blocks are not run."""

    def forward(self, *_: Any, **inputs: Any) -> None:
        """Raises `_Reached`."""
        raise _Reached(inputs)


class _BlockDouble(nn.Module):
    """Double of the first block of a decoder that reads items itself."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> None:
        """Raises `_Reached`."""
        raise _Reached({"inputs_embeds": states})


def _joins(decoder: Any) -> bool:
    """Whether a text decoder reads items itself."""
    return any(name.startswith(("pixel_", "image_pixel", "audio_input")) for name in _parameters(decoder.forward))


def load_media_encoder(folder: ModelFolder, spec: ModelSpec) -> MediaEncoder:
    """Build the library's class without its text decoder, and read the weights of the rest.

    Raises:
        ModelError: the checkpoint reads no images or audio, its towers cannot be built or read, or an adapter changes
            them in a way that is not supported.
    """
    config = media_config(folder)
    if isinstance(config, str):
        raise ModelError(f"{folder.path} takes no images or audio: {config}.")
    cls = _without_text(library_class(config), spec.dtype)
    with silence_library(), torch.no_grad(), WeightReader(folder.tensors) as reader:
        weights = {name: LazyWeight(name, reader, spec.dtype) for name in folder.tensors}
        model, _ = library_model(cls, config, spec, folder, weights, part="towers")
    return MediaEncoder(model.eval().to(spec.device), spec)


def tower_bytes(folder: ModelFolder, spec: ModelSpec) -> int:
    """Bytes of the weights that `load_media_encoder` will hold; 0 if the checkpoint reads no images or audio.

    Raises:
        ModelError: the towers cannot be built.
    """
    config = media_config(folder)
    if isinstance(config, str):
        return 0
    with silence_library():
        towers = meta_model(config, _without_text(library_class(config), spec.dtype))
    numbers: int = sum(parameter.numel() for parameter in towers.parameters())
    return numbers * spec.dtype.itemsize


def _without_text(cls: Any, dtype: torch.dtype) -> Any:
    """A class of the same name whose instances have a double of the text decoder, and no language head."""

    def build(self: Any, *args: Any, **options: Any) -> None:
        cls.__init__(self, *args, **options)
        part = causal_part(self)
        decoder, head = text_decoder(part), part.get_output_embeddings()
        if _joins(decoder):  # it has the towers, so that only its blocks are left out
            decoder.layers = nn.ModuleList([_BlockDouble()])
            decoder.set_input_embeddings(_ZeroEmbedding(decoder.get_input_embeddings(), dtype))
        for name, module in list(self.named_modules()):
            owner, _, attribute = name.rpartition(".")
            if module is decoder and not _joins(decoder):
                self.get_submodule(owner)._modules[attribute] = _DecoderDouble(decoder, dtype)
            elif module is head:
                self.get_submodule(owner)._modules[attribute] = None
        for table in ("all_tied_weights_keys", "_tied_weights_keys"):
            setattr(self, table, {})

    return type(cls.__name__, (cls,), {"__init__": build, "__module__": cls.__module__})


def _joining_part(model: Any) -> Any:
    """The module inside the class with the head that joins features and text; the class itself if it does."""
    inner = getattr(model, model.base_model_prefix, None)
    joins_itself = inner is None or isinstance(inner, _DecoderDouble)
    return model if joins_itself else inner


def _parameters(call: Any) -> Mapping[str, Any]:
    return inspect.signature(call).parameters


@torch.no_grad()
def _adapted_parameters(adapter: Adapter, model: Any) -> dict[str, Tensor]:
    """The parameters of a model that an adapter changes, by name, in the model's dtype and on its device.

    Args:
        adapter: the part of an adapter that changes towers, see `Adapter.towers`.
        model: the library's model, whose names the adapter has, or those that an older library gave to them.

    Raises:
        ModelError: the adapter changes something that the model lacks, that has another size, or that is not a linear
            layer or a convolution; the message names it.
    """
    adapter = adapter.part({module: module for module in adapter.modules if not _SPEAKS.search(module)})
    for module in (*adapter.tokens, *adapter.experts):
        raise _refused(adapter, module, "which is not a linear layer or a convolution that reads images or audio")
    names = [f"{module}.weight" for module in adapter.layers]
    names += [f"{module}.{name}" for module, parameters in adapter.saved.items() for name in parameters]
    places = _names_in_model(names, model)
    changed: dict[str, Tensor] = {}
    with adapter_reader(adapter) as reader:
        for module, parameters in adapter.saved.items():
            for name, info in parameters.items():
                place = _place(adapter, places, model, f"{module}.{name}")
                own = model.get_parameter(place)
                if tuple(info.shape) != tuple(own.shape):
                    shapes = f"{list(info.shape)} in the adapter and {list(own.shape)} in the model"
                    raise _refused(adapter, f"{module}.{name}", f"which has shape {shapes}")
                changed[place] = read_tensor(reader, f"{module}.saved.{name}", info).to(own)
        for module in adapter.layers:
            place = _place(adapter, places, model, f"{module}.weight")
            owner = model.get_submodule(place.rpartition(".")[0])
            # torch's own attention reads the weight of its last layer itself, so that peft has no effect on that.
            if type(owner) is not NonDynamicallyQuantizableLinear:
                changed[place] = _merged(adapter, reader, module, owner)
    return changed


def _names_in_model(names: list[str], model: Any) -> dict[str, str]:
    """Name of a parameter in an adapter -> its name in the model; others that the model lacks or has converted."""
    own = {unscoped(name): name for name, _ in model.named_parameters()}
    targets = ((name, "" if converted else target) for name, target, converted in library_names(model, names))
    return {name: own.get(unscoped(target), target) for name, target in targets}


def _place(adapter: Adapter, places: dict[str, str], model: Any, name: str) -> str:
    place = places[name]
    if place not in dict(model.named_parameters()):
        problem = "which is not a parameter of the modules that read images or audio; check its base model"
        raise adapter.error(f"it changes {name}, {problem}")
    return place


def _merged(adapter: Adapter, reader: WeightReader, module: str, owner: Any) -> Tensor:
    """The weight of a module with an adapter's change: [O, I], or [O, I, ...] of a convolution."""
    is_linear, is_convolution = type(owner) is nn.Linear, type(owner) in _CONVOLUTIONS and owner.groups == 1
    if not (is_linear or is_convolution):
        raise _refused(adapter, module, f"a {type(owner).__name__}, which is neither a linear layer nor a convolution")
    layer, weight = adapter.layers[module], owner.weight.detach()
    if layer.bias is not None:
        raise _refused(adapter, module, "with a bias (lora_bias)")
    if layer.down.shape[1:] != tuple(weight.shape[1:]) or layer.up.shape[0] != len(weight):
        shapes = f"{list(layer.down.shape)} and {list(layer.up.shape)}"
        raise adapter.error(f"its matrices {shapes} do not fit {module} of the model; check its base model")
    down, up = (read_tensor(reader, f"{module}.{name}", getattr(layer, name)).flatten(1) for name in ("down", "up"))
    changed = weight.float().cpu().flatten(1) + layer.scale * up @ down
    if layer.magnitude is not None:
        changed *= (read_tensor(reader, f"{module}.magnitude", layer.magnitude) / changed.norm(dim=1))[:, None]
    merged: Tensor = changed.view_as(weight).to(weight)
    return merged


def _refused(adapter: Adapter, module: str, problem: str) -> Exception:
    return adapter.error(f"it changes {module}, {problem}; merge the adapter into the model")
