"""The text part of a checkpoint that may pack more, such as vision and audio towers: its configuration and its tensors.

Imports neither torch nor transformers. Checkpoints nest the configuration of their text decoder, and put a prefix in
front of the names of its tensors: `model.language_model.layers.0...` with the head `lm_head.weight`, or
`language_model.model.layers.0...` with `language_model.lm_head.weight`. Everything else is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from batchgen.errors import ModelError

NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which configurations nest that of their text decoder, which may nest in turn."""
_TOWERS: Final = (
    "vision_config", "audio_config", "vision_encoder_config", "encoder_config", "protein_encoder_config", "vq_config",
)  # fmt: skip
_TIED: Final = "tie_word_embeddings"
_EMBEDDINGS: Final = ("embed_tokens.weight", "embeddings.weight")
"""Usual names of the token embedding inside a decoder, which may be stored under another one than the library's."""
_SCOPES: Final = ("model", "language_model", "text_model", "llm", "thinker")
"""Names in front of those of the text decoder's modules, which differ between a checkpoint and its text part."""


def unscoped(module: str) -> str:
    """A module's name without the scopes of the text decoder."""
    first, _, rest = module.partition(".")
    return unscoped(rest) if first in _SCOPES and rest else module


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Configuration of the text decoder: the innermost nested one, else `config` itself.

    The outer configuration decides whether the head is the embedding. If none does, it is unless a head is stored.
    """
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            outer = config.get(_TIED)
            text = text_config(inner)
            tied = text.get(_TIED) if outer is None else outer
            return {**text, _TIED: True if tied is None else tied}
    return config


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether the configuration of the text decoder is a part of `config`."""
    return any(isinstance(config.get(key), dict) for key in NESTED)


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of this configuration may hold more than a text decoder."""
    return is_nested(config) or any(isinstance(config.get(key), dict) for key in _TOWERS)


def has_scores(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a head that scores sequences."""
    return any(str(cls).endswith("ForSequenceClassification") for cls in config.get("architectures") or ())


@dataclass(frozen=True, slots=True)
class TextTensors:
    """Places of the tensors of a causal language model in a checkpoint."""

    decoder: str
    """What precedes the names of the decoder's tensors, such as `model.language_model.`."""
    head: str
    """What precedes the name of the head's tensor, such as `language_model.`."""
    others: bool
    """Whether tensors with other names may be stored, which are not read."""

    def is_read(self, name: str, head: str = "lm_head.") -> bool:
        """Whether the stored tensor `name` belongs to the text part; `head` begins the head's own names."""
        return not self.others or name.startswith((self.decoder, self.head + head))


def find_text_tensors(
    names: Iterable[str], config: Mapping[str, Any], embedding: str | None = None, head: str = "lm_head."
) -> TextTensors:
    """Find the tensors of the text decoder among the stored ones.

    Args:
        names: names of the stored tensors.
        config: the checkpoint's configuration.
        embedding: name of the token embedding inside the decoder; None: not known.
        head: beginning of the names of the head's tensors.

    Raises:
        ModelError: several decoders are stored, and the names do not tell which one has the text.
    """
    stored = set(names)
    usual = _EMBEDDINGS if embedding is None else (embedding, *_EMBEDDINGS)
    known = next((end for end in usual if any(f".{name}".endswith(f".{end}") for name in stored)), usual[0])
    stems = sorted(name.removesuffix(known) for name in stored if f".{name}".endswith(f".{known}"))
    prefixes = [stem for stem in stems if any(name.startswith(f"{stem}layers.0.") for name in stored)] or stems
    if len(prefixes) > 1:
        keys = [key.removesuffix("_config") for key in NESTED if isinstance(config.get(key), dict)]
        prefixes = [prefix for prefix in prefixes if any(key in prefix for key in (*keys, "language"))] or prefixes
    if len(prefixes) > 1 and is_packed(config):
        found = ", ".join(prefix + known for prefix in prefixes)
        raise ModelError(
            f"The checkpoint holds several decoders ({found}), and its names do not tell which one has the text. "
            "Use a checkpoint of the text decoder alone."
        )
    prefix = prefixes[0] if prefixes else "model."
    return TextTensors(prefix, _head_prefix(stored, prefix, head), is_packed(config))


def _head_prefix(stored: set[str], decoder: str, head: str) -> str:
    """The nearest outer scope of the decoder that has a head; the outermost if there is none."""
    scope = decoder.removesuffix(".")
    while scope:
        scope = scope.rpartition(".")[0]
        prefix = f"{scope}." if scope else ""
        if any(name.startswith(prefix + head) for name in stored):
            return prefix
    return ""
