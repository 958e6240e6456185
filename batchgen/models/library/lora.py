"""LoRA adapters of transformers models: a wrapper around each adapted module reads the step's segments from a slot."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.lora import LoraPair, LoraPairs, LoraStep, scale_products
from batchgen.kernels.moe import ExpertPairs, moe_experts
from batchgen.kernels.ops import TORCH_OPS, Ops
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.library.layers.experts import experts_of, is_experts
from batchgen.models.library.parallel import Cut
from batchgen.models.lora.adapters import (
    AdaptedEnds,
    adapted_ends,
    adapter_reader,
    expert_pairs,
    fused_pair,
    read_tensor,
)
from batchgen.models.lora.config import Adapter
from batchgen.models.lora.fit import ExpertSizes, LinearSize, Sites


class LoraSlot:
    """LoRA segments of the current step, shared with all wrapped modules of one model."""

    __slots__ = ("head", "ops", "step", "tokens", "visited")

    def __init__(self) -> None:
        self.step: LoraStep | None = None
        self.tokens = 0
        """Number of flat tokens in the step, T."""
        self.ops: Ops = TORCH_OPS
        self.head: Tensor | None = None
        """[R] adapter of each state that the head sees, -1 for none; None: no state has one."""
        self.visited: set[str] | None = None
        """Names of the modules that have run; None: not recorded."""

    @contextmanager
    def step_context(self, step: LoraStep | None, tokens: int, ops: Ops) -> Iterator[None]:
        """Set the step's segments and operations while its forward runs."""
        self.step, self.tokens, self.ops = step, tokens, ops
        try:
            yield
        finally:
            self.step = None

    def visit(self, name: str, tokens: int) -> None:
        """Note that an adapted module runs, on so many tokens.

        Raises:
            ModelError: these are not the tokens of the step.
        """
        if tokens != self.tokens:
            raise ModelError(
                f"An adapter (--lora) changes {name}, which sees {tokens} of a step's {self.tokens} tokens: batchgen "
                "cannot determine which of them use the adapter. Merge the adapter into the model."
            )
        if self.visited is not None:
            self.visited.add(name)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of one layer, and the slot that says which of them a step uses."""

    name: str
    """Name of the layer's module."""
    slot: LoraSlot
    pairs: LoraPairs

    def visit(self, tokens: int) -> LoraStep | None:
        """The current step's segments, None if no token has an adapter; the layer sees so many tokens.

        Raises:
            ModelError: these are not the tokens of the step.
        """
        if self.slot.step is not None:
            self.slot.visit(self.name, tokens)
        return self.slot.step


@runtime_checkable
class AppliesAdapters(Protocol):
    """A module that applies its layer's adapters, instead of a wrapper around it."""

    def adapt(self, adapters: LayerAdapters) -> None:
        """Apply these adapters from now on."""


_Changes = TypeVar("_Changes")


class _Wrapper(nn.Module, Generic[_Changes]):
    """A module that adapters change; attributes that it does not have are those of the wrapped module."""

    def __init__(self, name: str, base: nn.Module, slot: LoraSlot, changes: _Changes) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self._slot = slot
        self._changes = changes
        """What adapters change; no submodules: the model's parameters stay its own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class _LoraLinear(_Wrapper[LoraPairs]):
    """Linear layer with LoRA adapters."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the leading dimensions hold the step's tokens in order."""
        out: Tensor = self.base(x)
        slot = self._slot
        if slot.step is None:
            return out
        flat = x.reshape(-1, x.shape[-1])  # [T, I]
        slot.visit(self.name, len(flat))
        made = out.view(-1, out.shape[-1])
        if self._changes.has_factors:
            scale_products(made, slot.step, self._changes)
        slot.ops.add_lora(made, flat, slot.step, self._changes)
        return out


class _Replaced(_Wrapper[list[nn.Module | None]]):
    """Module that adapters replace; it computes each token by itself."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """[1, T, ...] or [T, ...] -> the same leading dimensions, of each tensor if there are several."""
        out: Any = self.base(x, *args, **options)
        slot = self._slot
        if slot.step is None:
            return out
        axis = 0 if x.shape[0] == slot.tokens else 1
        slot.visit(self.name, x.shape[axis])
        for segment in slot.step.segments:
            module, rows = self._changes[segment.adapter], segment.rows
            if module is not None and rows is None:
                out = module(x, *args, **options)
            elif module is not None and rows is not None:
                part = module(x.index_select(axis, rows), *args, **options)
                if isinstance(out, tuple):  # as routers give
                    both = zip(out, part, strict=True)
                    out = tuple(each.index_copy(axis, rows, own.to(each.dtype)) for each, own in both)
                else:
                    out = out.index_copy(axis, rows, part)
        return out


class _LoraExperts(_Wrapper[list[ExpertPairs | None]]):
    """Experts of a layer with LoRA adapters, whose tokens are computed by their definition."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]."""
        out: Tensor = self.base(x, ids, weights)
        slot = self._slot
        if slot.step is None:
            return out
        slot.visit(self.name, len(x))
        experts = experts_of(self.base)
        assert experts is not None
        for segment in slot.step.segments:
            pairs = self._changes[segment.adapter]
            if pairs is not None:
                rows = slice(None) if segment.rows is None else segment.rows
                out[rows] = moe_experts(x[rows], ids[rows], weights[rows], experts, pairs)
        return out


class _Embedding(_Wrapper[AdaptedEnds]):
    """Embedding that adapters change."""

    def forward(self, ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, H]."""
        out: Tensor = self.base(ids)
        slot = self._slot
        if slot.step is None:
            return out
        slot.visit(self.name, ids.numel())
        factor = getattr(self.base, "embed_scale", None)
        factor = 1.0 if factor is None else factor
        return self._changes.embed(ids[0], out[0], slot.step, factor)[None]


class _Head(_Wrapper[AdaptedEnds]):
    """Head that adapters change."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, R, H] -> [1, R, V]."""
        out: Tensor = self.base(hidden)
        return self._changes.logits(hidden[0], out[0], self._slot.head)[None]


def library_sites(model: Any) -> Sites:
    """Modules of a library model that adapters may change; the model has the library's layers, on any device."""
    from transformers.pytorch_utils import Conv1D  # importing the library takes seconds

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linears: dict[str, LinearSize] = {}
    tables: dict[str, LinearSize] = {}
    replaceable: dict[str, dict[str, tuple[int, ...]]] = {}
    fixed: dict[str, str] = {}
    experts: dict[str, ExpertSizes] = {}
    matrices: dict[str, LinearSize] = {}
    head_name = ""
    for name, module in model.named_modules():
        if is_experts(module):
            weights = experts_of(module)
            if weights is None:
                fixed[name] = "experts whose computation batchgen does not know; merge the adapter into the model"
            else:
                experts[name] = ExpertSizes(*weights.down.shape)
        if ".experts." in name:
            fixed[name] = "an expert, which batchgen does not adapt; merge the adapter into the model"
            continue
        if module is embedding:
            tables[name] = (module.weight.shape[0], module.weight.shape[1])
        elif type(module) is nn.Linear:
            linears[name] = (module.in_features, module.out_features)
        elif type(module) is Conv1D:
            linears[name] = (int(module.weight.shape[0]), int(module.weight.shape[1]))
        elif isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2:
            matrices[name] = (int(module.weight.shape[1]), int(module.weight.shape[0]))
        head_name = name if module is head else head_name
        if not any(True for _ in module.children()) and name:
            replaceable[name] = {key: tuple(value.shape) for key, value in module.named_parameters()}
    tied = head.weight is embedding.weight
    return Sites(linears, tables, head_name, tied, replaceable, experts, matrices, fixed)


def wrap_adapted(model: Any, adapters: Sequence[Adapter], sites: Sites, like: Tensor, cut: Cut) -> LoraSlot:
    """Wrap every module that an adapter changes, in place; the adapters must have been checked.

    Args:
        model: the model.
        adapters: of all rows, in order.
        sites: of the model.
        like: tensor of the model's dtype and device.
        cut: how the model is split among ranks; the sites are those of the whole model.

    Returns:
        The slot that passes a step's segments to the wrappers.
    """
    slot, table, head = LoraSlot(), model.get_input_embeddings(), model.get_output_embeddings()
    ends_of = (next(iter(sites.tables)), sites.head)
    ends = _ends(adapters, sites, ends_of, table, head, cut)
    pairs: dict[str, list[LoraPair | None]] = defaultdict(lambda: [None] * len(adapters))
    replaced: dict[str, list[nn.Module | None]] = defaultdict(lambda: [None] * len(adapters))
    experts: dict[str, list[ExpertPairs | None]] = defaultdict(lambda: [None] * len(adapters))
    for index, adapter in enumerate(adapters):
        with adapter_reader(adapter) as reader:
            for module in adapter.experts:
                whole = expert_pairs(adapter, reader, module, sites.experts[module], like)
                experts[module][index] = cut.expert_pairs(module, whole)
            for module in (module for module in (*adapter.layers, *adapter.saved) if module not in ends_of):
                base = model.get_submodule(module)
                change = _change_of(adapter, reader, module, base, module in sites.matrices, like, cut)
                if isinstance(change, nn.Module):
                    replaced[module][index] = change
                else:
                    pairs[module][index] = change
    for module, expert in experts.items():
        _wrap(model, _LoraExperts(module, model.get_submodule(module), slot, expert))
    for module, by_adapter in replaced.items():
        _wrap(model, _Replaced(module, model.get_submodule(module), slot, by_adapter))
    for module, of_adapters in pairs.items():
        child, of_layer = model.get_submodule(module), LayerAdapters(module, slot, LoraPairs(of_adapters))
        if isinstance(child, AppliesAdapters):
            child.adapt(of_layer)
        else:
            _wrap(model, _LoraLinear(module, child, slot, of_layer.pairs))
    if ends is not None and any(ends.tables):
        _wrap(model, _Embedding(ends_of[0], table, slot, ends))
    if ends is not None and ends.adapts_head:
        _wrap(model, _Head(ends_of[1], head, slot, ends))
    return slot


def _change_of(
    adapter: Adapter, reader: WeightReader, module: str, base: Any, is_matrix: bool, like: Tensor, cut: Cut
) -> nn.Module | LoraPair | None:
    """The module that replaces one of the model's, or what is added to the products of a linear layer."""
    layer = adapter.layers.get(module)
    if isinstance(base, AppliesAdapters) and (layer is None or layer.magnitude or layer.bias):
        problem = f"it replaces {module}, its norms (DoRA) or its bias"
        raise adapter.error(f"{problem}; merge the adapter into the model")
    if module in adapter.saved:
        saved = adapter.saved[module].items()
        tensors = {name: read_tensor(reader, f"{module}.saved.{name}", info).to(like) for name, info in saved}
        return _with_parameters(base, {name: cut.own(f"{module}.{name}", whole) for name, whole in tensors.items()})
    rows = [(module, adapter.layers[module].up.shape[0])]
    pair = fused_pair(adapter, reader, rows, like, None if is_matrix else partial(_weights_of, module, base, cut))
    assert pair is not None
    if not is_matrix:
        return cut.pair(module, pair)
    return _with_parameters(base, {"weight": base.weight + cut.own(f"{module}.weight", pair.up @ pair.down)})


def _ends(
    adapters: Sequence[Adapter], sites: Sites, names: tuple[str, str], table: Any, head: Any, cut: Cut
) -> AdaptedEnds | None:
    """Changes of adapters to the embedding and the head, which have these names; None if there are none."""
    if all(adapter.modules.isdisjoint(names) for adapter in adapters):
        return None
    bias = None if head.bias is None else cut.whole(f"{names[1]}.bias", head.bias.detach())
    weight = cut.whole(f"{names[1]}.weight", head.weight.detach())
    # The rows of a tied embedding may be those of the head (`stack_projections`).
    rows = weight if sites.tied else cut.whole(f"{names[0]}.weight", table.weight.detach())
    ends = adapted_ends(adapters, (names[0], rows), (names[1], weight, bias), tied=sites.tied)
    tokens = cut.ranks.part(len(weight), 32)
    return ends and replace(ends, heads=tuple(change and change.part(tokens) for change in ends.heads))


def _wrap(model: nn.Module, wrapper: _Wrapper[Any]) -> None:
    """Put a wrapper in the place of what it wraps. What adapters add to layers and experts is in the ranks' sum."""
    parent, _, attribute = wrapper.name.rpartition(".")
    if isinstance(wrapper, _LoraLinear | _LoraExperts):
        wrapper._forward_hooks, wrapper.base._forward_hooks = wrapper.base._forward_hooks, wrapper._forward_hooks
    model.get_submodule(parent)._modules[attribute] = wrapper


def _weights_of(name: str, module: Any, cut: Cut) -> tuple[Tensor, Tensor | None]:
    """Whole weight [O, I] and bias [O] of a linear layer."""
    weight = cut.whole(f"{name}.weight", module.weight.detach())
    bias = None if module.bias is None else cut.whole(f"{name}.bias", module.bias.detach())
    return weight.T if type(module).__name__ == "Conv1D" else weight, bias


def _with_parameters(module: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """A copy of a module that shares all but the given parameters."""
    made: nn.Module = copy.copy(module)
    if not module._parameters:  # a linear layer that was repacked
        outputs, inputs = tensors["weight"].shape
        made = nn.Linear(inputs, outputs, module.bias is not None, device="meta")
        made._forward_hooks = module._forward_hooks
        tensors = tensors if module.bias is None else {"bias": module.bias, **tensors}
    made._parameters = {**made._parameters, **{n: nn.Parameter(t, requires_grad=False) for n, t in tensors.items()}}
    return made


def check_visited(run: Callable[[], object], slot: LoraSlot, adapter: Adapter, head: str) -> None:
    """Reject an adapter of which `run`, a forward without the head, does not run a layer, or not on all tokens."""
    slot.visited = set()
    run()
    idle = sorted(adapter.modules - slot.visited - {head})
    slot.visited = None
    if idle:
        raise adapter.error(f"the model's forward does not run {idle[0]}; merge the adapter into the model")
