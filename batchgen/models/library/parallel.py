"""Tensor parallelism of library models: the part of each parameter that a rank has, and what its modules exchange.

Attention is split by whole heads, feed-forward layers and experts by their inner sizes, the embedding and the head by
tokens. A module with a parameter that is not known here is whole on every rank, as recurrent mixers, norms and routers
are. The library's own plan says that the forwards of a class take smaller sizes, and how fused projections are laid
out. Parameters keep their names, so that what reads, stacks, adapts or computes layers sees smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.lora import LoraPair
from batchgen.kernels.moe import ExpertPairs
from batchgen.kernels.ranks import Ranks
from batchgen.kernels.vocab_parallel import WORD
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.stored_tensors import Conversion, library_names
from batchgen.models.library.layers.experts import experts_of, is_experts
from batchgen.models.library.recurrence import is_mixer
from batchgen.models.library.text import causal_part, text_decoder

Indexes = list[tuple[slice, ...]]  # as for `LazyWeight`
_OUT: Final = ("o_proj", "out_proj", "dense")
_BY_HEAD: Final = ("q_proj", "q_b_proj", "kv_b_proj", "g_proj", "gate_proj")
_BY_KEY_HEAD: Final = ("k_proj", "v_proj")
_OF_ALL_HEADS: Final = ("q_a_proj", "kv_a_proj_with_mqa")
"""Linear layers of attention: the last one, those with rows for each query head or each key head, and those whose
results all heads share."""
_DOWN: Final = ("down_proj", "fc2", "c_proj", "fc_out", "dense_4h_to_h", "w2", "output_linear")
_UP: Final = (
    "gate_proj",
    "up_proj",
    "fc1",
    "c_fc",
    "fc_in",
    "dense_h_to_4h",
    "w1",
    "w3",
    "gate_up_proj",
    "input_linear",
)
"""Linear layers of feed-forward modules: the last one, and those before."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor: ranges of one axis, in order."""

    axis: int
    size: int
    """Of the axis, in the whole tensor."""
    ranges: tuple[slice, ...]
    repeats: tuple[slice, ...] = ()
    """Those that a rank before has too: of key heads, if there are more ranks than these."""

    def of(self, whole: Tensor) -> Tensor:
        """The part, in new memory."""
        return torch.cat([whole.narrow(self.axis, r.start, r.stop - r.start) for r in self.ranges], self.axis)

    def placed(self, part: Tensor) -> Tensor:
        """The part in a tensor of the whole size, with zeros around: all ranks' sum is whole."""
        rows = part.movedim(self.axis, 0)
        whole = rows.new_zeros(self.size, *rows.shape[1:])
        for r, own in zip(self.ranges, torch.split(rows, [r.stop - r.start for r in self.ranges]), strict=True):
            whole[r] = 0 if r in self.repeats else own
        return whole.movedim(0, self.axis)


class _LocalConfig:
    """A configuration with the head counts of one rank."""

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        vars(self).update(counts, _whole=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_whole"], name)


class Cut:
    """How a model is split among ranks, as one of them sees it. Names are those of its causal part.

    `whole` is the model on the meta device; with one rank nothing is split.

    Raises:
        ModelError: the model cannot be split.
    """

    def __init__(self, ranks: Ranks, whole: Any) -> None:
        self.ranks = ranks
        self.parts: dict[str, Part] = {}
        """By parameter; others are whole."""
        self._summed: list[str] = []
        """Modules whose results all ranks sum."""
        self._added: list[str] = []
        """Parameters that may be added to these results: the first rank has them, others have zeros."""
        self._norms: dict[str, Part] = {}
        """Modules that need all ranks' numbers of the last axis."""
        self._counts: dict[str, dict[str, int]] = {}
        """Numbers of heads, by module and attribute."""
        self._table = self._prefix = ""
        self.read_in_part: set[str] = set()
        if ranks.count == 1:
            return
        model = causal_part(whole)
        self._prefix = next(f"{name}." if name else "" for name, module in whole.named_modules() if module is model)
        self._plan = {key.rpartition(".")[2]: style for key, style in (model._tp_plan or {}).items()}
        inside = set(text_decoder(model).modules())
        for name, module in model.named_modules():
            if module in inside and not self._split_experts(name, module) and not self._split_attention(name, module):
                self._split_mlp(name, module)
        if not self._plan or not self.parts:
            problem = "cannot be split among devices on the transformers path: transformers has no plan for that"
            raise ModelError(f"A {whole.config.model_type} model {problem}. Use --tensor-parallel 1, or another model.")
        for name, module in model.named_modules():
            if module in (model.get_input_embeddings(), model.get_output_embeddings()):
                self._table = name if module is model.get_input_embeddings() else self._table
                self._split(name, module, 0, ranks.part(module.weight.shape[0], WORD))

    def _split(self, name: str, module: Any, axis: int, *ranges: slice, repeats: tuple[slice, ...] = ()) -> None:
        """Split the weight of a module, and the bias by the same outputs; split by inputs, the first rank adds it."""
        self.parts[f"{name}.weight"] = part = Part(axis, module.weight.shape[axis], ranges, repeats)
        if axis:
            self._added.append(f"{name}.bias")
            self._summed.append(name)
        elif getattr(module, "bias", None) is not None:
            self.parts[f"{name}.bias"] = part

    def _inner(self, size: int) -> slice:
        """A rank's part of an inner size: if it can be, an equal one in whole blocks of quantised formats."""
        units = (unit for unit in (256, 128, 64, 32, 16, 8, 4, 2) if size % (unit * self.ranks.count) == 0)
        return self.ranks.part(size, next(units, 1))

    def _split_experts(self, name: str, module: Any) -> bool:
        """Split experts that are stored in one tensor for each projection; returns whether they are such."""
        own = {key: p for key, p in module._parameters.items() if p is not None}
        key, down = "gate_up_proj" if "gate_up_proj" in own else "up_proj", own.get("down_proj")
        if down is None or down.ndim != 3 or key not in own:
            return False
        up, times = own[key], 2 if key == "gate_up_proj" else 1
        usual = times == 1 or up.shape[2] != 2 * down.shape[1] or up.shape[1] != down.shape[2]
        axis = 2 if getattr(module, "is_transposed", not usual) else 1
        size, known = down.shape[3 - axis], experts_of(module) if is_experts(module) else None
        if up.shape[axis] != times * size or size < self.ranks.count or getattr(module, "has_post_expert_norm", False):
            return True
        inner = self._inner(size)
        ranges: tuple[slice, ...] = (inner, _shifted(inner, size))[:times]
        if known is not None and known.gating.interleaved:
            ranges = (slice(2 * inner.start, 2 * inner.stop),)
        self.parts[f"{name}.{key}"] = Part(axis, times * size, ranges)
        self.parts[f"{name}.down_proj"] = Part(3 - axis, size, (inner,))
        if f"{key}_bias" in own:
            self.parts[f"{name}.{key}_bias"] = Part(1, times * size, ranges)
        self._added.append(f"{name}.down_proj_bias")
        self._summed.append(name)
        return True

    def _split_mlp(self, name: str, module: Any) -> None:
        """Split a feed-forward module, if it is a known one."""
        linears, others = _children(module)
        last = next((key for key in _DOWN if key in linears), None)
        if last is None or others or any(True for _ in module.parameters(recurse=False)):
            return
        down = linears.pop(last)
        size, widths = down.in_features, {linear.out_features for linear in linears.values()}
        sparse = getattr(module, "activation_sparsity", 0)  # its threshold depends on all numbers
        if not linears.keys() <= {*_UP} or not widths <= {size, 2 * size} or size < self.ranks.count or sparse:
            return
        own = self._inner(size)
        for key, linear in linears.items():
            self._split(f"{name}.{key}", linear, 0, *(own, _shifted(own, size))[: linear.out_features // size])
        self._split(f"{name}.{last}", down, 1, own)

    def _split_attention(self, name: str, module: Any) -> bool:
        """Split an attention module by heads; returns whether it was."""
        linears, others = _children(module)
        last = next((key for key in _OUT if key in linears), None)
        size = next((n for key in ("head_dim", "head_size", "qk_head_dim") if (n := getattr(module, key, 0))), 0)
        latent = "kv_b_proj" in linears
        # An indexer selects keys for each head where these are not latent.
        known = all("Norm" in type(child).__name__ or (latent and key == "indexer") for key, child in others.items())
        if last is None or not size or is_mixer(module) or not known:
            return False
        out, value = linears.pop(last), getattr(module, "v_head_dim", None) or size
        heads = keys = out.in_features // value
        if "k_proj" in linears:
            keys = linears["k_proj"].out_features // size
        elif not latent:
            keys = heads // getattr(module, "num_key_value_groups", 1)
        loose = dict(module.named_parameters(recurse=False))
        if heads < self.ranks.count or not keys or heads % keys or any(p.shape[0] != heads for p in loose.values()):
            return False
        query, key = self.ranks.heads(heads, keys)
        before = Ranks(self.ranks.rank - 1, self.ranks.count).heads(heads, keys)[1] if self.ranks.rank else None

        def rows(width: int, held: slice = query, start: int = 0) -> slice:
            """The rows of this rank's heads, of `width` each, from a row on."""
            return _shifted(slice(held.start * width, held.stop * width), start)

        found: dict[str, tuple[tuple[slice, ...], tuple[slice, ...]]] = {}
        for child, linear in linears.items():
            width, style = linear.out_features, self._plan.get(child)
            if child == "qkv_proj" and style == "colwise_gather_output":
                of_keys: tuple[slice, ...] = rows(size, key, heads * size), rows(value, key, (heads + keys) * size)
                found[child] = (rows(size), *of_keys), of_keys
            elif child in _BY_KEY_HEAD and width % keys == 0:
                found[child] = ((rows(width // keys, key),),) * 2
            elif width % heads == 0 and (child in _BY_HEAD or (child == "query_key_value" and style == "colwise")):
                found[child] = (rows(width // heads),), ()
            elif child not in _OF_ALL_HEADS:
                return False
        for child, (ranges, of_keys) in found.items():
            repeats = of_keys if before == key else ()
            self._split(f"{name}.{child}", linears[child], 0, *ranges, repeats=repeats)
        for child in loose:
            self.parts[f"{name}.{child}"] = Part(0, heads, (query,))
        for child, norm in others.items():
            projection, weight = f"{child[0]}_proj", getattr(norm, "weight", None)
            if weight is None:  # of an indexer, which is whole
                continue
            if weight.ndim == 2:
                self._split(f"{name}.{child}", norm, 0, key if child.startswith("k") else query)
            elif child in ("q_norm", "k_norm") and projection in found and size < weight.numel():
                self._norms[f"{name}.{child}"] = replace(self.parts[f"{name}.{projection}.weight"], axis=-1)
        self._split(f"{name}.{last}", out, 1, rows(value))
        own, own_keys = query.stop - query.start, key.stop - key.start
        self._counts[name] = {"num_key_value_groups": own // own_keys, "num_key_value_heads": own_keys}
        self._counts[name] |= dict.fromkeys(("num_heads", "num_attention_heads"), own)
        return True

    def apply(self, model: Any, only: Collection[str] | None = None) -> None:
        """Split the parameters of a causal part that are whole, and tell its modules the numbers of heads.

        `only`: names of the parameters to split, with those that are tied to them; None: all.
        """
        parameters = {name: model.get_parameter(name) for name in self.parts}
        wanted = {id(parameters[name]) for name in (parameters if only is None else only)}
        made: dict[int, nn.Parameter] = {}
        for name, old in parameters.items():
            module, part = model.get_submodule(name.rpartition(".")[0]), self.parts[name]
            if id(old) in wanted and old.shape[part.axis] == part.size:
                made.setdefault(id(old), nn.Parameter(part.of(old.detach()), requires_grad=False))
                module._parameters[name.rpartition(".")[2]] = made[id(old)]
            if type(module) is nn.Linear:
                module.out_features, module.in_features = module.weight.shape
            elif isinstance(module, nn.Embedding):
                module.num_embeddings, module.padding_idx = module.weight.shape[0], None
        for name, parameter in model.named_parameters():
            if self.ranks.rank and name in self._added:
                parameter.data.zero_()
        for name, counts in self._counts.items():
            attributes = vars(model.get_submodule(name))
            attributes.update((key, count) for key, count in counts.items() if key in attributes)
            attributes["config"] = _LocalConfig(attributes.get("config"), counts)

    def exchange(self, model: Any, total: Callable[[Tensor], Tensor] | None = None) -> list[Any]:
        """Let the modules of a causal part exchange what they compute, by `total`; returns handles that end it."""
        total = total or self.ranks.sum
        hooks: list[Any] = []
        for name in self._summed:
            module = model.get_submodule(name)
            hooks.append(module.register_forward_hook(lambda _, args, out: total(out)))
            for child in module.children():
                if type(child) is nn.Identity:  # an expert whose result all ranks have
                    hooks.append(child.register_forward_pre_hook(lambda _, args: args[0] / self.ranks.count))
        for name, part in self._norms.items():
            module = model.get_submodule(name)
            gather = lambda _, args, part=part: total(part.placed(args[0]))  # noqa: E731
            hooks.append(module.register_forward_pre_hook(gather))
            hooks.append(module.register_forward_hook(lambda _, args, out, part=part: part.of(out)))
        if self._table:
            (own,), held = self.parts[f"{self._table}.weight"].ranges, [torch.empty(0)]

            def places(_: Any, args: tuple[Tensor]) -> Tensor:
                held[0] = (args[0] >= own.start) & (args[0] < own.stop)
                inside: Tensor = (args[0] - own.start) * held[0]
                return inside

            table = model.get_submodule(self._table)
            hooks.append(table.register_forward_pre_hook(places))
            hooks.append(table.register_forward_hook(lambda _, args, out: total(out * held[0][..., None])))
        return hooks

    def stored(self, whole: Any, folder: ModelFolder, renamed: Mapping[str, str] | None) -> dict[str, Indexes]:
        """Stored tensors of which a part is enough -> its indexes; `renamed` is as for `library_names`.

        The parameters that these become must be split before (`read_in_part`), and others after they are read.
        """
        found: dict[str, Indexes] = {}
        for name, target, conversion in library_names(whole, folder.tensors, renamed):
            part = self.parts.get(target.removeprefix(self._prefix)) if target.startswith(self._prefix) else None
            indexes = [] if part is None else _indexes(part, folder.tensors[name].shape, conversion)
            if indexes:
                self.read_in_part.add(target.removeprefix(self._prefix))
                found[name] = indexes
        return found

    def own(self, name: str, whole: Tensor) -> Tensor:
        """A rank's part of a tensor in the place of the parameter `name`."""
        if name in self._added and self.ranks.rank:
            return torch.zeros_like(whole)
        return self.parts[name].of(whole) if name in self.parts else whole

    def whole(self, name: str, own: Tensor) -> Tensor:
        """All ranks' parts of the parameter `name`, of which this one has `own`."""
        if name in self._added:
            return self.ranks.sum(own.clone())
        return self.ranks.sum(self.parts[name].placed(own)) if name in self.parts else own

    def pair(self, module: str, pair: LoraPair) -> LoraPair:
        """A rank's part of an adapter's matrices for a linear layer."""
        part = self.parts.get(f"{module}.weight")
        if part is None:
            return pair
        if part.axis:
            return replace(pair, down=part.of(pair.down), shift=None if self.ranks.rank else pair.shift)
        rows = {name: getattr(pair, name) for name in ("up", "factor", "shift")}
        return replace(pair, **{name: part.of(x) for name, x in rows.items() if x is not None})

    def expert_pairs(self, module: str, pairs: ExpertPairs) -> ExpertPairs:
        """A rank's part of an adapter's matrices for the experts of a layer."""
        if f"{module}.down_proj" not in self.parts:
            return pairs
        up, down = (self.parts[f"{module}.{name}"] for name in ("gate_up_proj", "down_proj"))
        return ExpertPairs(
            pairs.gate_up and (pairs.gate_up[0], replace(up, axis=1).of(pairs.gate_up[1])),
            pairs.down and (replace(down, axis=2).of(pairs.down[0]), pairs.down[1]),
        )


def _indexes(part: Part, shape: tuple[int, ...], conversion: Conversion | None) -> Indexes:
    """Indexes of what a stored tensor has of a part of a parameter, which it becomes; none if they are not known."""
    axis, place, count = part.axis, 0, 1
    if conversion is not None:
        rule, pattern = conversion
        kinds = [type(operation).__name__ for operation in rule.operations]
        merged = kinds[0] == "MergeModulelist"  # along a new first axis
        axis -= merged
        if kinds[merged:] not in ([], ["Concatenate"]) or len(rule.target_patterns) > 1 or axis < 0:
            return []
        if len(kinds) > merged and rule.operations[-1].dim == part.axis:
            place, count = rule.source_patterns.index(pattern), len(rule.source_patterns)
    size, before = shape[axis], [slice(0, each) for each in shape[:axis]]
    inside = [_shifted(r, -place * size) for r in part.ranges if size * count == part.size]
    return [(*before, slice(max(r.start, 0), min(r.stop, size))) for r in inside if r.start < size and r.stop > 0]


def _children(module: Any) -> tuple[dict[str, nn.Linear], dict[str, Any]]:
    """The linear layers of a module, and its other children with parameters that are not single numbers."""
    children = {n: child for n, child in module.named_children() if any(p.numel() > 1 for p in child.parameters())}
    linears = {name: child for name, child in children.items() if type(child) is nn.Linear}
    return linears, {name: child for name, child in children.items() if name not in linears}


def _shifted(own: slice, by: int) -> slice:
    return slice(own.start + by, own.stop + by)
