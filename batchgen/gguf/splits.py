"""How byte-level vocabularies split a text into words before they merge bytes, by the name in `tokenizer.ggml.pre`.

The expressions are those of the families' tokenizer.json. Each step splits what the steps before it left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DIGITS: Final = "digits"
"""The step that makes each digit a word."""
_LETTERS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2: Final = rf"{_LETTERS}|\p{{N}}|{_SIGNS}"
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = rf"{_LOWER}|{_UPPER}|\p{{N}}|{_SLASHES}"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O: Final = rf"{_LOWER}{_SHORT}|{_UPPER}{_SHORT}|\p{{N}}{{1,3}}|{_SLASHES}"
_SEED: Final = rf"{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", DIGITS)

_NAMES: Final[Mapping[tuple[str, ...], str]] = {
    (): "default gpt-2 phi-2 a.x-4.0 mellum gigachat mpt olmo jais trillion exaone4 granite-docling",
    (DIGITS,): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (_SEED,): "seed-coder",
    (_BAILING,): "bailingmoe bailingmoe2 llada-moe",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    _DEEPSEEK_CODER: "deepseek-coder",
}
SPLITS: Final = {name: steps for steps, names in _NAMES.items() for name in names.split()}
"""Name of a rule -> its steps; no step is the rule of GPT-2."""
_LLAMA3_NAMES: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2")
WHOLE_WORDS: Final = frozenset((*_LLAMA3_NAMES, "tekken"))
"""Rules whose vocabularies take a word that is a token as it is, without merging it."""
ADD_BOS: Final = frozenset((*_LLAMA3_NAMES, "tekken"))
"""Rules whose texts begin with BOS if the file does not say."""
