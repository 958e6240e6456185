"""Any causal language model of transformers, unmodified, with our attention in place of the library's.

The library looks attention up in a registry by name. Ours is registered once as `batchgen` and finds the step's
`Attention` among the keywords that forwards hand down. A model whose forwards drop keywords gets it from a slot that
belongs to that one model. No mask is built and no cache of the library's is used.

Logits are made by the model's own forward with its decoder taken out, so that soft caps and scales of any kind stand.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchgen.errors import ModelError
from batchgen.kernels.types import Attention
from batchgen.models.base import ModelInput, ModelSpec, TokenEmbeds
from batchgen.models.experts import ExpertsSlot
from batchgen.models.insides import Insides, find_insides
from batchgen.models.lora import LoraSlot
from batchgen.models.probe import ProbeAttention

__all__ = ["ATTENTION_NAME", "HookedModel", "KeywordDropped", "TransformersModel", "decoder_name", "register_attention"]

ATTENTION_NAME: Final = "batchgen"
_KEYWORD: Final = "batchgen_attention"
_SLOT: Final = "batchgen_slot"
_HARMLESS: Final = frozenset((
    "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "return_dict", "logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "layer_idx", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "training", "deterministic",
))  # fmt: skip
"""Arguments of attention that change nothing where tokens are packed, causal and not trained on."""


class KeywordDropped(Exception):
    """The model's forwards do not hand keywords down to attention."""


class Slot:
    """Where the attention modules of one model find the step's `Attention` when keywords do not reach them."""

    __slots__ = ("attention",)

    def __init__(self) -> None:
        self.attention: Attention | None = None


def register_attention() -> None:
    """Enter our attention into the library's registry; doing it again changes nothing."""
    from transformers import AttentionInterface  # transformers takes seconds to import

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's signature. query [1, N, T, D], key [1, K, T, D], value [1, K, T, Dv] -> [1, T, N, Dv]."""
    attention = others.pop(_KEYWORD, None)
    if attention is None:
        slot = getattr(module, _SLOT, None)
        attention = None if slot is None else slot.attention
    if attention is None:
        raise KeywordDropped
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} gives attention a mask of its own, which is not supported.")
    strange = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if strange:
        raise ModelError(f"{type(module).__name__} asks attention for {strange[0]}, which is not supported.")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is, so it has no cache.")
    out = attention.attend(
        layer,
        query[0].transpose(0, 1),  # [T, N, D]
        key[0].transpose(0, 1),  # [T, K, D]
        value[0].transpose(0, 1),  # [T, K, Dv]
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
    )  # [T, N, Dv]
    return out.contiguous()[None], None


class _States:
    """A decoder's output: the states by name or as the first item; whatever else a head passes on is absent."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in the decoder's place and returns the states that it is handed as embeddings."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        """The states, however the head's model words its call."""
        return _States(inputs_embeds)

    @property
    def decoder(self) -> nn.Module:
        """Some heads reach one level deeper for the decoder."""
        return self


class HookedModel:
    """A library model whose attention is ours: packed tokens in, states and logits out.

    With `use_slot`, attention modules find the step's `Attention` in a slot; without, it travels as a keyword. Modules
    that adapters change find the step's segments in `lora`, and layers of experts the step's operations in `experts`.
    """

    def __init__(self, model: Any, *, use_slot: bool) -> None:
        name = decoder_name(model)
        assert name is not None
        self._decoder: Any = getattr(model, name)
        self._head: Any = _head_only(model, name)
        self._insides = Insides(())
        self._slot = Slot() if use_slot else None
        self.lora = LoraSlot()
        self.experts = ExpertsSlot()
        for module in model.modules() if use_slot else ():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self._slot)

    @property
    def insides(self) -> Insides:
        """What can be tapped, once it has been found."""
        return self._insides

    def find_insides(self, inputs: ModelInput) -> None:
        """Find what can be tapped, by one forward over `inputs`."""
        run = partial(self._forward, inputs, output_hidden_states=True)
        self._insides = find_insides(self._decoder, run, len(inputs.input_ids))

    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, [T, H]; fills the taps."""
        taps = inputs.taps
        with nullcontext() if taps is None else self._insides.tapped(taps):
            states: Tensor = self._forward(inputs).last_hidden_state[0]  # [T, H]
        if taps is not None and -1 in taps.layers:
            taps.take(-1, states)
        return states

    def _forward(self, inputs: ModelInput, **asked: bool) -> Any:
        """The decoder's own output."""
        keyword: dict[str, Attention] = {} if self._slot is not None else {_KEYWORD: inputs.attention}
        if self._slot is not None:
            self._slot.attention = inputs.attention
        try:
            with self.lora.during(inputs.lora, len(inputs.input_ids), inputs.ops), self.experts.during(inputs.ops):
                return self._decoder(
                    **self._tokens(inputs),
                    position_ids=inputs.positions[None],  # [1, T]
                    use_cache=False,
                    **asked,
                    **keyword,
                )
        finally:
            if self._slot is not None:
                self._slot.attention = None

    def _tokens(self, inputs: ModelInput) -> dict[str, Tensor]:
        """The step's tokens as ids [1, T], or as embeddings [1, T, E] where some come as such."""
        if inputs.embeds is None:
            return {"input_ids": inputs.input_ids[None]}
        looked_up = self._decoder.get_input_embeddings()(inputs.input_ids[None])  # [1, T, E]
        looked_up[0, inputs.embeds.rows] = inputs.embeds.values.to(looked_up.dtype)
        return {"inputs_embeds": looked_up}

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        out: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]  # [R, V]
        return out


class TransformersModel:
    """A library model behind the model seam. Made by `load_transformers`."""

    def __init__(self, model: HookedModel, spec: ModelSpec) -> None:
        self._model = model
        self._spec = spec

    @property
    def grouped(self) -> list[str]:
        """Layers of experts that the library computes by groups of as many tokens as happen to choose an expert."""
        return self._model.experts.left

    @property
    def spec(self) -> ModelSpec:
        """Sizes and identity."""
        return self._spec

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> Tensor:
        """States after the final norm, as `Model.hidden`."""
        return inputs.pick(self._model.hidden(inputs))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in the model's dtype."""
        return self._model.logits(hidden)

    @torch.no_grad()
    def recordable(self) -> bool:
        """Never: PyTorch computes."""
        return False

    def takes_embeds(self) -> bool:
        """Whether tokens may come as embeddings that are those of no id. Some types look ids up a second time."""
        spec = self._spec
        at = torch.arange(2, device=spec.device)
        values = torch.full((2, spec.embeds_size), 0.01, device=spec.device)
        try:
            self._model.hidden(ModelInput(at, at, ProbeAttention(), embeds=TokenEmbeds(at, values)))
        except Exception:  # a forward that wants the ids fails in its own way
            return False
        return True


def decoder_name(model: Any) -> str | None:
    """Under which name a causal language model holds its decoder; None if it holds none."""
    from transformers import PreTrainedModel  # as in register_attention

    if isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        return str(model.base_model_prefix)
    return next((name for name, child in model.named_children() if isinstance(child, PreTrainedModel)), None)


def _head_only(model: Any, decoder: str) -> Any:
    """The same model, sharing every parameter, with its decoder replaced by `_Given`."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[decoder] = _Given()
    return head
