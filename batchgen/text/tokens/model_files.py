"""Files of a model folder: generation settings, end-of-sequence ids, class and vocabulary of the tokenizer.

Settings are read from generation_config.json; config.json gives the end-of-sequence ids where that file does not.
`do_sample: false` is not applied: a published temperature is meant to be used, and a greedy run sets `temperature: 0`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError, RowError
from batchgen.gguf.header import read_gguf
from batchgen.request.fields.params import SamplingParams
from batchgen.request.foreign_text import ForeignTextError, read_json_file, typed

_MAIN: Final = "tokenizer.json"
_SENTENCEPIECE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_PAIR: Final = ("vocab.json", "merges.txt")
_TEKKEN: Final = "tekken.json"
VOCABULARY_FILES: Final = (_MAIN, *_SENTENCEPIECE, "vocab.json", "vocab.txt", "tiktoken.model", _TEKKEN)
_TIKTOKEN_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s")
"""A line of a tiktoken vocabulary: a token in base64 and its number."""
SAMPLES: Final = ("The quick brown fox jumps over the lazy dog.", "Prices: 1,234.50 for 2 cafés, naïve 東京", "a b c")
"""Texts that every tokenizer must encode, and on which a converted vocabulary is compared with its own library."""
_UNSET = SamplingParams()
_PLAIN: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys whose values are those of the sampling fields of the same name."""
_MASKS: Final = ("suppress_tokens", "begin_suppress_tokens")
"""Keys whose values are lists of token ids, which sampling fields of the same name mask."""
_BAD_WORDS: Final = "bad_words_ids"
_NO_CHANGE: Final = {
    "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "typical_p": 1.0, "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "no_repeat_ngram_size": 0, "top_h": None,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "exponential_decay_length_penalty": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "force_words_ids": None, "constraints": None,
    "min_length": 0, "min_new_tokens": 0, "max_new_tokens": None, "max_time": None, "stop_strings": None,
    "token_healing": False, "watermarking_config": None, "penalty_alpha": 0.0, "dola_layers": None,
    "xtc_probability": 0.0, "mirostat": 0,
}  # fmt: skip
"""Keys that are not applied -> the value that changes no result; null changes none, either."""


def plain_config(folder: Path) -> Any:
    """Minimal model configuration with which transformers chooses the tokenizer's class.

    Without a configuration the library builds the one of the model type, which imports slow modules. None if
    tokenizer_config.json does not name the class, or custom code takes part in the choice.
    """
    from transformers import PreTrainedConfig  # as in `_load_with_library`

    tokenizer, model = json_object(folder / "tokenizer_config.json"), json_object(folder / "config.json")
    if not isinstance(tokenizer.get("tokenizer_class"), str) or "auto_map" in tokenizer:
        return None
    if not isinstance(model.get("model_type"), str) or "auto_map" in model:
        return None
    kept = {key: model[key] for key in ("model_type", "model_name", "tokenizer_class") if key in model}
    return PreTrainedConfig(name_or_path=str(folder), **kept)


def _is_undescribed(folder: Path) -> bool:
    """Whether no file of a folder says which class its tokenizer has, and its model is none of a known type."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if "tokenizer_class" in json_object(folder / "tokenizer_config.json"):
        return False
    model = json_object(folder / "config.json")
    return "tokenizer_class" not in model and TOKENIZER_MAPPING_NAMES.get(model.get("model_type")) != "GPT2Tokenizer"


def json_object(path: Path) -> dict[str, Any]:
    """JSON object in a file; {} if the file is missing or damaged, which the library reports when it loads."""
    try:
        return _read_object(path)
    except ModelError:
        return {}


def _read_object(path: Path) -> dict[str, Any]:
    """JSON object in a file of the model; {} if the file is missing.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        return typed(read_json_file(path), {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path.name} of the model cannot be read ({error}); fetch the model again") from None
    except ForeignTextError as error:
        raise ModelError(f"{path.name} of the model {error}; fetch the model again") from None


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Generation settings of one model folder."""

    eos_ids: frozenset[int] = frozenset()
    raw: Mapping[str, Any] = field(default_factory=dict)
    """Content of generation_config.json, {} where the file is missing."""

    def sampling_defaults(self, vocab_size: int) -> dict[str, Any]:
        """The sampling fields that the model sets.

        Token ids past the vocabulary are left out: they are never sampled. So is an end of sequence among bad words,
        as in transformers.

        Raises:
            ModelError: a value is of another type or out of range.
        """
        defaults = {key: value for key in (*_PLAIN, *_MASKS) if (value := self.raw.get(key)) is not None}
        if type(k := defaults.get("top_k")) is float and k.is_integer():
            defaults["top_k"] = int(k)
        for key in _MASKS:
            if isinstance(defaults.get(key), list):
                defaults[key] = [token for token in defaults[key] if _may_be_sampled([token], vocab_size)]
        words = self.raw.get(_BAD_WORDS)
        if isinstance(words, list):
            ends = [[token] for token in self.eos_ids]
            words = [word for word in words if word not in ends and _may_be_sampled(word, vocab_size)]
        if words is not None:
            defaults["bad_words"] = words
        for name, value in defaults.items():
            try:
                replace(_UNSET, **{name: value})
            except RowError as error:
                remedy = "correct it or run with --sampling-defaults openai"
                where = f"`{_BAD_WORDS}`: " if name == "bad_words" else ""
                raise ModelError(f"generation_config.json: {where}{error}; {remedy}") from None
        return {name: value for name, value in defaults.items() if value != []}

    @property
    def note(self) -> str | None:
        """The settings that would change results and are not applied, in one line; None if there are none."""
        left = [
            f"`{key}` {json.dumps(value)[:60]}"
            for key, same in _NO_CHANGE.items()
            if (value := self.raw.get(key)) not in (None, [], {}, same)
        ]
        if not left:
            return None
        return f"not applied, though generation_config.json sets it: {', '.join(left)}; set what is needed in the rows"


def _may_be_sampled(ids: Any, vocab_size: int) -> bool:
    """Whether a list may be of tokens of the vocabulary; true for what is not a list of integers."""
    known = isinstance(ids, list) and all(type(token) is int for token in ids)
    return not known or all(0 <= token < vocab_size for token in ids)


def load_generation_config(folder: Path, config: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Read the generation settings of the model in `folder`, or in a GGUF file; one without any has empty ones.

    `config` is what counts in place of the contents of config.json.

    Raises:
        ModelError: a file is damaged, or an end-of-sequence id is not a token id.
    """
    if folder.is_file():
        # Imported here because its library is slow to import, and folders do not need it.
        from batchgen.gguf.vocabulary import gguf_end_ids, gguf_sampling

        header = read_gguf(folder)
        return GenerationConfig(gguf_end_ids(header), gguf_sampling(header))
    raw = _read_object(folder / "generation_config.json")
    eos = raw.get("eos_token_id")
    if eos is None:
        config = _read_object(folder / "config.json") if config is None else config
        nested = config.get("text_config")
        eos = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int or token < 0 for token in listed):
        raise ModelError(f"{folder.name}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return GenerationConfig(frozenset(listed), raw)


def check_vocabulary(folder: Path, path: object) -> None:
    """Check that a folder has a vocabulary that can be read here; `path` is how the user named it.

    Raises:
        ModelError: it has none, only a part of one, or one of a format that needs a package or a conversion.
    """
    if (folder / _MAIN).is_file():
        return
    convert = f"Its rules are in code that is never run: name a folder with {_MAIN} of these tokens with --tokenizer"
    for name in _SENTENCEPIECE:
        if (folder / name).is_file():
            if _TIKTOKEN_LINE.match(_first_bytes(folder / name)):
                raise ModelError(f"{path} has a tiktoken vocabulary ({name}) and no {_MAIN}. {convert}")
            missing = [package for package in ("sentencepiece", "protobuf") if not _is_installed(package)]
            if missing:
                raise ModelError(
                    f"the tokenizer of {path} is a SentencePiece model ({name}), which is read with the package "
                    f"{' and '.join(missing)}. Install the extra: pip install 'batchgen[sentencepiece]'"
                )
            return
    pair = [name for name in _PAIR if (folder / name).is_file()]
    if len(pair) == 1:
        lacks = next(name for name in _PAIR if name not in pair)
        raise ModelError(f"the tokenizer of {path} has {pair[0]} but lacks {lacks}. Copy the folder again")
    if pair or (folder / "vocab.txt").is_file():
        return
    tiktoken = next((file.name for file in sorted(folder.glob("*tiktoken*")) if file.is_file()), None)
    if tiktoken is not None:
        raise ModelError(f"{path} has a tiktoken vocabulary ({tiktoken}) and no {_MAIN}. {convert}")
    if (folder / _TEKKEN).is_file():
        raise ModelError(f"{path} has a vocabulary in Mistral's own format ({_TEKKEN}) and no {_MAIN}. {convert}")
    raise ModelError(f"{path} holds no tokenizer (none of {', '.join(VOCABULARY_FILES[:3])}, ...)")


def load_pair(folder: Path) -> Any:
    """The transformers tokenizer of byte-level BPE files without a description; None if the folder has others."""
    has_others = (folder / _MAIN).is_file() or not all((folder / name).is_file() for name in _PAIR)
    if has_others or not _is_undescribed(folder):
        return None
    from transformers import GPT2Tokenizer  # as in `_load_with_library`

    # Its own special tokens would be added to the vocabulary.
    none: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"))
    return GPT2Tokenizer.from_pretrained(str(folder), trust_remote_code=False, **none)


def check_conversion(backend: Any, folder: Path, path: object) -> None:
    """Check that a SentencePiece model, which transformers converts, cuts texts as its own library does.

    Raises:
        ModelError: it does not, as when the folder names a tokenizer class of another algorithm.
    """
    file = next((folder / name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    if file is None or (folder / _MAIN).is_file():
        return
    from sentencepiece import SentencePieceProcessor  # `check_vocabulary` found it

    original = SentencePieceProcessor(model_file=str(file))
    for text in SAMPLES:
        if original.unk_id() in original.encode(text):
            continue  # each library spells unknown text in its own way
        if backend.encode(text, add_special_tokens=False).tokens != original.encode(text, out_type=str):
            raise ModelError(
                f"the SentencePiece model of {path} ({file.name}) gives other tokens when transformers converts it, as "
                "with a `tokenizer_class` of another algorithm in tokenizer_config.json. Use a folder with "
                f"{_MAIN}, or name another tokenizer with --tokenizer"
            )


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(512)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from None


def _is_installed(package: str) -> bool:
    try:
        return find_spec("google.protobuf" if package == "protobuf" else package) is not None
    except ModuleNotFoundError:  # the parent package
        return False
