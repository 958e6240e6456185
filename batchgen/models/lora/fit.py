"""Checks of LoRA adapters against the model that they are for, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batchgen.models.checkpoint.text_part import unscoped
from batchgen.models.lora.config import Adapter, ExpertPart

LinearSize = tuple[int, int]
"""(inputs, outputs) of a linear layer."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer's experts."""

    count: int
    hidden: int
    inner: int

    def place(self, part: ExpertPart) -> tuple[str, int] | None:
        """Parameter (`gate_up_proj` or `down_proj`) and first output of a change; None if it does not fit."""
        size, ranks = (part.down.shape[1], part.up.shape[0]), (part.down.shape[0], part.up.shape[1])
        if ranks[0] != ranks[1]:
            return None
        both = {(self.hidden, 2 * self.inner): ("gate_up_proj", 0), (self.inner, self.hidden): ("down_proj", 0)}
        if part.expert is None:
            return both.get(size) if ranks[0] % self.count == 0 else None
        one = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", self.inner), "down_proj": ("down_proj", 0)}
        name = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part.projection, part.projection)
        needed = (self.inner, self.hidden) if name == "down_proj" else (self.hidden, self.inner)
        return one.get(name) if size == needed and part.expert < self.count else None


@dataclass(frozen=True, slots=True)
class Sites:
    """Modules of a model that adapters may change, by name."""

    linears: Mapping[str, LinearSize]
    """Linear layers, the head among them."""
    tables: Mapping[str, LinearSize]
    """Embeddings -> (tokens, features)."""
    head: str
    """The head, one of `linears`; it has the name even where it is the embedding."""
    tied: bool
    """Whether the head is the embedding."""
    replaceable: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Modules that may be replaced -> shapes of their parameters."""
    experts: Mapping[str, ExpertSizes] = field(default_factory=dict)
    """Experts of layers -> their sizes."""
    matrices: Mapping[str, LinearSize] = field(default_factory=dict)
    """Other modules with a weight [outputs, inputs], such as routers."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Modules that peft supports and batchgen does not -> the reason."""

    def changes_head(self, adapter: Adapter) -> bool:
        """Whether an adapter changes the head; replaced rows of a tied embedding are rows of the head."""
        return self.head in adapter.modules or (self.tied and not adapter.tokens.keys().isdisjoint(self.tables))

    def is_plain(self, adapter: Adapter) -> bool:
        """Whether an adapter changes linear layers of the decoder alone."""
        return adapter.modules <= self.linears.keys() - {self.head} and not adapter.saved

    def is_tiled(self, adapter: Adapter) -> bool:
        """Whether an adapter only adds to the products of these layers; DoRA and biases change them in other ways."""
        layers = adapter.layers.values()
        return self.is_plain(adapter) and not any(layer.magnitude or layer.bias for layer in layers)

    def cannot_replace(self, adapter: Adapter) -> str | None:
        """A module that an adapter replaces, and that may not be replaced here; None if there is none."""
        known = {unscoped(name) for name in self.replaceable}
        return next((name for name in adapter.saved if unscoped(name) not in known), None)

    def names(self) -> frozenset[str]:
        """All modules."""
        return frozenset((*self.linears, *self.tables, *self.replaceable, *self.experts, *self.fixed))


def fit_adapter(adapter: Adapter, sites: Sites) -> None:
    """Check that an adapter whose modules have the model's names fits it.

    Raises:
        ModelError: the adapter changes a module that the model lacks, that has another size or that is fixed, or it
            lacks the weights of a targeted layer.
    """
    ends = {*sites.tables, sites.head}
    if adapter.config.get("ensure_weight_tying") and sites.tied and ends & {*adapter.layers, *adapter.saved}:
        problem = "it ties what it changes of the embedding and the head (ensure_weight_tying), which is not supported"
        raise adapter.error(f"{problem}; merge the adapter into the model")
    all_linear = str(adapter.config.get("target_modules")).lower() == "all-linear"
    for module, reason in sites.fixed.items():
        if module in adapter.modules or (not all_linear and adapter.targets(module)):
            raise adapter.error(f"it changes {module}, {reason}")
    for module, layer in adapter.layers.items():
        known = next((each for each in (sites.tables, sites.matrices) if module in each), sites.linears)
        if module not in known:
            raise adapter.error(f"it changes {module}, which is not a linear layer of the model; check its base model")
        if layer.bias is not None and known is not sites.linears:
            raise adapter.error(f"it has a bias (lora_bias) for {module}, which is not a linear layer of the model")
        size, needed = (layer.down.shape[1], layer.up.shape[0]), known[module]
        if size != needed or len(layer.down.shape) > 2:
            raise adapter.error(
                f"{module} maps {needed[0]} to {needed[1]} features in the model and {size[0]} to {size[1]} in the "
                "adapter; check its base model"
            )
    for module, parts in adapter.experts.items():
        if module not in sites.experts:
            raise adapter.error(f"it changes {module}, which are not experts of the model; check its base model")
        for part in parts:
            if sites.experts[module].place(part) is None:
                shapes = f"{list(part.down.shape)} and {list(part.up.shape)}"
                raise adapter.error(f"its matrices {shapes} do not fit {module} of the model; check its base model")
    _fit_replacements(adapter, sites)
    wanted = (module for module in sites.linears if module != sites.head or not all_linear)
    lost = [module for module in wanted if adapter.targets(module) and module not in adapter.layers]
    if lost:
        raise adapter.error(
            f"adapter_config.json names {lost[0]} as a target, but adapter_model.safetensors does not hold it"
        )


def fit_adapters(adapters: Sequence[Adapter], sites: Sites, unread: Callable[[str], bool]) -> tuple[Adapter, ...]:
    """Adapters with the names that their modules have in a model, checked against it.

    Args:
        adapters: as `read_adapters` gives them.
        sites: of the model.
        unread: whether a name belongs to a part of the checkpoint that text does not run.

    Raises:
        ModelError: see `fit_adapter`.
    """
    located = tuple(adapter.located(sites.names(), unread) for adapter in adapters)
    for adapter in located:
        fit_adapter(adapter, sites)
    return located


def _fit_replacements(adapter: Adapter, sites: Sites) -> None:
    """Check modules and rows that are replaced."""
    for module, tensors in adapter.saved.items():
        if module not in sites.replaceable:
            raise adapter.error(
                f"it replaces {module} (modules_to_save), which is not a module of the model that can be replaced; use "
                "--model-impl transformers, or check its base model"
            )
        for parameter, info in tensors.items():
            needed = sites.replaceable[module].get(parameter)
            if info.shape != needed:
                raise adapter.error(
                    f"its {module}.{parameter} has shape {list(info.shape)}, and the model's {list(needed or ())}; an "
                    "adapter of a resized vocabulary needs a model that is resized too"
                )
    for module, rows in adapter.tokens.items():
        table = sites.tables.get(module) or (sites.linears[module][::-1] if module == sites.head else None)
        if table is None or max(rows.ids) >= table[0] or rows.values.shape[1] != table[1]:
            raise adapter.error(f"its trainable_token_indices do not fit {module} of the model; check its base model")
