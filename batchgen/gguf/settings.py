"""Generation settings in the metadata of a GGUF file: ids that end a sequence, and sampling defaults."""

from __future__ import annotations

from typing import Any, Final

from batchgen.gguf.header import GgufHeader

_CONTROL: Final = 3
"""Type of a control token."""
_TURN_ENDS: Final = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
        "<|end_of_text|>", "<|eom_id|>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|user|>",
        "<|observation|>",
    )
)  # fmt: skip
"""Control tokens that end a turn. A file states one end of sequence, which need not be that of a conversation."""
_SAMPLING: Final = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def gguf_end_ids(header: GgufHeader) -> frozenset[int]:
    """Ids that end a sequence or a turn."""
    tokens, types = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    stated = {header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    size = len(tokens) if isinstance(tokens, list) else 0
    found = {each for each in stated if type(each) is int and 0 <= each < size}
    if isinstance(tokens, list) and isinstance(types, list):
        found |= {
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if token in _TURN_ENDS and kind == _CONTROL
        }
    return frozenset(found)


def gguf_sampling(header: GgufHeader) -> dict[str, Any]:
    """Sampling defaults that the file states, by the names of generation_config.json."""
    found = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: float(f"{value:.6g}") if type(value) is float else value
        for name, value in found.items()
        if value is not None
    }
