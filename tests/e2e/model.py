"""A tiny real checkpoint: random Llama weights, a byte-level tokenizer, a chat template, generation defaults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import save_tiny

CONTEXT = 256
"""Context length of the model in tokens."""
DEFAULTS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
"""Sampling parameters of its generation_config.json."""

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello there, how are you today? I am fine, thank you!",
    "Sorting numbers: 1, 2, 3 and 10. Stop here, please.",
    "Zażółć gęślą jaźń — naïve café, 東京 and émigré.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
]
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{{- bos_token -}}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def save_model(
    folder: Path,
    context: int = CONTEXT,
    *,
    template: str = TEMPLATE,
    added: Sequence[str] = (),
    specials: int = 0,
    model_type: str = "llama",
    **config: Any,
) -> Path:
    """Write the checkpoint to `folder`. Weights are large, so that the likeliest token leads by a wide margin.

    Args:
        folder: where it is written.
        context: its context length.
        template: its chat template.
        added: further tokens of the vocabulary, the first `specials` of which are special tokens.
        specials: see `added`.
        model_type: its type.
        config: further fields of its configuration.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[2:]})
    tokenizer.add_tokens(list(added[:specials]), special_tokens=True)
    tokenizer.add_tokens(list(added[specials:]))
    tokenizer.chat_template = template
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": context, "initializer_range": 0.2}
    save_tiny(
        model_type, folder, **{"vocab_size": len(tokenizer), **sizes, "bos_token_id": 0, "eos_token_id": 1, **config}
    )
    tokenizer.save_pretrained(folder)
    eos_ids = [backend.token_to_id(name) for name in ("</s>", "<|im_end|>")]
    (folder / "generation_config.json").write_text(json.dumps({**DEFAULTS, "eos_token_id": eos_ids}))
    return folder
