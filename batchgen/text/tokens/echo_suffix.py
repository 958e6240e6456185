"""Text that `echo` and `suffix` add around a completion."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.request.fields.params import SamplingParams
from batchgen.text.tokens.tokenizer import Tokenizer


def add_echo_and_suffix(text: str, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer) -> str:
    """The completion's `text`, after the prompt's text where `echo` is set and before `suffix`.

    Args:
        text: the completion's text, with the space that separates it from the prompt, if there is one.
        prompt_ids: [P] token ids of the prompt.
        params: the row's parameters.
        tokenizer: the model's tokenizer.
    """
    prompt = echo_text(prompt_ids, tokenizer) if params.echo else ""
    return f"{prompt}{text}{params.suffix or ''}"


def echo_text(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The prompt's text with special tokens written out, without the BOS that the tokenizer adds."""
    prefix = tokenizer.prefix_ids
    ids = [int(token) for token in prompt_ids]
    without_bos = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
    return tokenizer.decode(without_bos, skip_special_tokens=False)
