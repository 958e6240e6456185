"""What `echo` and `suffix` put around a completion's text."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.params import SamplingParams
from batchgen.text.tokenizer import Tokenizer

__all__ = ["echoed", "surround"]


def surround(text: str, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> str:
    """`text` with the prompt's in front where `echo` asks for it, and `suffix` after it.

    Args:
        text: the completion's own, which begins with the space between it and the prompt where there is one.
        prompt_ids: [P]
        params: the row's.
        tokenizer: the model's.
    """
    before = echoed(prompt_ids, tokenizer) if params.echo else ""
    return f"{before}{text}{params.suffix or ''}"


def echoed(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt's text as it was rendered, special tokens written out, without the BOS the tokenizer puts in front."""
    prefix = tokenizer.prefix_ids
    ids = [int(token) for token in prompt_ids]
    own = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
    return tokenizer.decode(own, skip_special_tokens=False)
