"""Tokenizer and generation settings out of a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.gguf.header import read_gguf
from batchgen.gguf.settings import gguf_end_ids, gguf_sampling
from batchgen.text.generation_config import GenerationConfig


def load_gguf_tokenizer(path: Path) -> tuple[Any, GenerationConfig, str]:
    """The tokenizer of transformers that a GGUF file describes, its generation settings, and its header's SHA-256.

    Raises:
        ModelError: the file holds no tokenizer, or one that cannot be made of its metadata.
    """
    # Imported here because these are slow to import, as in `Tokenizer.load`.
    from transformers import PreTrainedTokenizerFast

    from batchgen.gguf.vocabulary import gguf_vocabulary

    header = read_gguf(path)
    found = gguf_vocabulary(header)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=found.backend,
        chat_template=found.chat_template,
        clean_up_tokenization_spaces=False,
        **found.special,
    )
    return hf, GenerationConfig(gguf_end_ids(header), gguf_sampling(header)), header.digest
