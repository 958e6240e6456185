"""The packaged demonstration model: size, configuration, tokenizer and answers with transformers."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen.demo import model_path
from batchgen.demo.tasks import TASKS, is_correct
from configs.demo_model.evaluate import completions, heldout, prompt_ids
from configs.demo_model.export import language_model

LARGEST = 12_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return language_model(model_path())


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= LARGEST


def test_it_is_a_llama_with_tied_embeddings_and_grouped_queries(model: Any) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert not model.generation_config.do_sample


def test_end_tokens_agree(model: Any, tokenizer: Any) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eos|>"])
    assert model.config.eos_token_id == ends
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]
    assert len(tokenizer) == model.config.vocab_size


def test_held_out_prompts_are_answered_exactly(model: Any, tokenizer: Any) -> None:
    examples = heldout(per_task=20)
    texts = completions(model, tokenizer, examples)
    correct = Counter(example.task for example, text in zip(examples, texts, strict=True) if is_correct(example, text))
    assert sum(correct.values()) / len(examples) >= 0.9, correct
    assert set(correct) == set(TASKS)


def test_the_tokenizer_is_lossless_for_any_text(tokenizer: Any) -> None:
    rng = Random(0)
    planes = [range(0x20, 0x7F), range(0x80, 0x2000), range(0x2000, 0xD800), range(0xE000, 0x10000)]
    planes.append(range(0x10000, 0x110000))
    for _ in range(300):
        text = "".join(chr(rng.choice(rng.choice(planes))) for _ in range(rng.randrange(40)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2048")[-4:] == ["2", "0", "4", "8"]


def test_the_template_starts_and_continues_turns(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert opened == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    begun = [*messages, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False) == f"{opened}Hello"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|bos|><|user|>ab<|end|>"


def test_raw_text_and_chat_have_one_bos(tokenizer: Any) -> None:
    for example in heldout(per_task=5):
        ids = prompt_ids(tokenizer, example)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
