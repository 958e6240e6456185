"""Tokenizer of the demonstration model: byte-level BPE trained on the tasks' text, and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from batchgen.demo.tasks import draw

BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = [BOS, EOS, PAD, END, *ROLES.values()]

# Digits, blanks and punctuation are separate pieces. A word then has the same tokens after a blank, after a quote and
# at the start of a line, so that a small model learns to copy words in general.
PIECES = r"\p{N}|\s|\p{L}+|[^\p{L}\p{N}\s]"

VOCABULARY = 2048
CORPUS_EXAMPLES = 60_000
CONTEXT = 2048

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
  {{- '<|system|>Write a call as <tool_call>{"name": "NAME", "arguments": {}}</tool_call>. The tools: ' -}}
  {{- tools | tojson }}<|end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception('this model has the roles system, user and assistant, not ' + message['role']) -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'image' -%}{{- '<|image|>' -}}
      {%- elif part['type'] == 'text' -%}{{- part['text'] -}}
      {%- else -%}{{- raise_exception('this model reads text and images, not ' + part['type']) -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def corpus(seed: int) -> Iterator[str]:
    """Training text of the merges, without the copying task, whose random strings would waste merges."""
    for index in range(CORPUS_EXAMPLES):
        example = draw("train", seed, index)
        if example.task != "copy":
            yield example.content.prompt if example.chat else example.content.raw
            yield f" {example.content.answer}"
            yield example.content.answer


def train_tokenizer(seed: int) -> Any:
    """A `PreTrainedTokenizerFast` with `VOCABULARY` tokens that encodes any Unicode text losslessly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(seed), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[EOS, *ROLES.values()],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
