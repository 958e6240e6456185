"""What `echo` and `suffix` put around a completion's text."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.params import SamplingParams
from batchgen.text.tokenizer import Tokenizer

__all__ = ["echoed", "surround"]


def surround(
    text: str, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
) -> str:
    """`text` with the prompt's in front where `echo` asks for it, and `suffix` after it.

    Args:
        text: the completion's own.
        prompt_ids: [P]
        output_ids: [C]
        params: the row's.
        tokenizer: the model's.
    """
    before = echoed(prompt_ids, output_ids, tokenizer) if params.echo else ""
    return f"{before}{text}{params.suffix or ''}"


def echoed(prompt_ids: Sequence[int], output_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt's text as it was rendered, special tokens written out, without the BOS the tokenizer puts in front.

    Some decoders take the space off the first token of a text: where prompt and completion have one between them, it
    is given back.
    """
    prefix = tokenizer.prefix_ids
    ids = [int(token) for token in prompt_ids]
    own = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
    text = tokenizer.decode(own, skip_special_tokens=False)
    if own and output_ids:
        first = tokenizer.token_text(output_ids[0])
        joined = tokenizer.decode([own[-1], output_ids[0]], skip_special_tokens=False)
        if joined == f"{tokenizer.token_text(own[-1])} {first}":
            return text + " "
    return text
