"""Tokenizer and generation settings of a GGUF file, out of its metadata."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from batchgen.errors import ModelError
from batchgen.gguf.header import GgufHeader
from batchgen.gguf.metadata import decimal

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Types of tokens."""
_SPACE: Final = "▁"
_ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special token of transformers -> its name in the metadata."""
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}
"""Special ids of a SentencePiece vocabulary whose file does not state them."""
_TURN_ENDS: Final = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
        "<|end_of_text|>", "<|eom_id|>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|user|>",
        "<|observation|>", "<|eot|>", "<|eom|>", "[EOT]",
    )
)  # fmt: skip
"""Control tokens that end a turn. A file states one end of sequence, which need not be that of a conversation."""
_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "mirostat": "mirostat",
    "penalty_repeat": "repetition_penalty", "xtc_probability": "xtc_probability",
}  # fmt: skip

_RULES: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("splits.toml").read_text(encoding="utf-8"))
DIGITS: Final = "digits"
"""The step that makes each digit a word."""
SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(step if step == DIGITS else "|".join(step) for step in rule["steps"])
    for rule in _RULES["rules"]
    for name in rule["names"]
}
"""Name of a rule -> its steps; no step is the rule of GPT-2."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer and what goes with it."""

    backend: Any
    """The Rust tokenizer."""
    special: Mapping[str, str]
    """Special token of transformers (`bos_token`, ...) -> its text."""
    chat_template: str | dict[str, str] | None


class _Vocabulary:
    """The checked lists of a file."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.tokens: list[str] = self._list("tokens", str) or []
        if not self.tokens:
            raise self.error("holds no vocabulary")
        size = len(self.tokens)
        self.types: Sequence[int] = self._list("token_type", int, size) or [1] * size
        self.scores: Sequence[float] | None = self._list("scores", float, size)
        self.merges: list[str] | None = self._list("merges", str)

    def value(self, key: str) -> Any:
        """A value of the tokenizer's metadata; None if it is absent."""
        return self.header.metadata.get(f"tokenizer.ggml.{key}")

    @property
    def rule(self) -> str | None:
        """Name of the rule by which texts are split into words."""
        rule = self.value("pre")
        if not isinstance(rule, str | None):
            raise self.error("names the rule that splits texts (tokenizer.ggml.pre) by something else than a text")
        return rule

    def _list(self, key: str, kind: type, size: int | None = None) -> list[Any] | None:
        entries = self.value(key)
        if entries is None:
            return None
        if not isinstance(entries, list | memoryview) or any(type(each) is not kind for each in entries):
            raise self.error(f"has a list tokenizer.ggml.{key} with other entries than {kind.__name__}")
        if size is not None and len(entries) != size:
            raise self.error(f"has {len(entries)} entries in tokenizer.ggml.{key} for {size} tokens")
        return list(entries)

    def special_id(self, role: str, default: int | None = None) -> int | None:
        """Id of a special token that the vocabulary has; None for none."""
        token_id = self.value(f"{role}_token_id")
        token_id = default if token_id is None else token_id
        return token_id if type(token_id) is int and 0 <= token_id < len(self.tokens) else None

    def ids(self) -> dict[str, int]:
        """Token -> id, without the tokens that only pad the vocabulary to the size of the embedding."""
        ids: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED or token != f"[PAD{i}]":
                ids.setdefault(token, i)
        return ids

    def error(self, reason: str) -> ModelError:
        """An error of the file's tokenizer."""
        return ModelError(f"the tokenizer of {self.header.path} {reason}. Name another tokenizer with --tokenizer")


def gguf_vocabulary(header: GgufHeader) -> GgufVocabulary:
    """The tokenizer that a file describes.

    Raises:
        ModelError: it holds none, or one of a kind that cannot be made of its metadata.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        raise ModelError(f"{header.path} holds no tokenizer. Name one with --tokenizer")
    vocabulary = _Vocabulary(header)
    defaults: Mapping[str, int] = {}
    if kind == "gemma4" or (kind == "gpt2" and vocabulary.rule in _RULES["sentencepiece"]):
        backend, add_bos = _sentencepiece(vocabulary, prefix=False), kind == "gemma4"
    elif kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, add_bos, defaults = _sentencepiece(vocabulary, prefix=True), True, _SENTENCEPIECE_IDS
    else:
        raise vocabulary.error(f"is of the kind {str(kind)[:40]!r}, which is not supported")
    _add_tokens(backend, vocabulary, kind)
    special = {
        name: vocabulary.tokens[token_id]
        for name, role in _ROLES.items()
        if (token_id := vocabulary.special_id(role, defaults.get(role))) is not None
    }
    stated = None if kind == "gemma4" else vocabulary.value("add_bos_token")  # its first files say no by mistake
    if (add_bos if stated is None else stated is True) and "bos_token" in special:
        backend.post_processor = _with_bos(special["bos_token"], vocabulary.special_id("bos", defaults.get("bos")))
    return GgufVocabulary(backend, special, _templates(header))


def _with_bos(token: str, token_id: int | None) -> Any:
    """A post-processor that puts BOS in front; the token goes by another name, as its text may be any."""
    bos = {"id": "BOS", "ids": [token_id], "tokens": [token]}
    return processors.TemplateProcessing(single=["BOS", "$A"], pair=["BOS", "$A", "$B:1"], special_tokens=[bos])


def _byte_level(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """A byte-level BPE tokenizer, and whether its family begins texts with BOS."""
    pre = vocabulary.rule
    if vocabulary.merges is None:
        raise vocabulary.error("has no merges")
    if pre not in SPLITS and pre is not None:
        raise vocabulary.error(f"splits texts by a rule {str(pre)[:40]!r}, which is not known")
    merges = [_pair(merge) for merge in vocabulary.merges]
    ids = vocabulary.ids()
    try:
        model = BPE(ids, merges, ignore_merges=pre in _RULES["whole_words"])
    except Exception as error:  # the library raises plain exceptions
        raise vocabulary.error(f"has merges that do not fit its tokens ({str(error)[:100]})") from None
    backend = Tokenizer(model)
    steps = SPLITS.get(pre or "", ())
    splits: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if step == DIGITS
        else pre_tokenizers.Split(Regex(step), behavior="isolated")
        for step in steps
    ]
    plain = not steps or steps == (DIGITS,)
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _RULES["add_bos"]


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(vocabulary: _Vocabulary, *, prefix: bool) -> Any:
    """A SentencePiece BPE tokenizer with byte fallback, and whether texts begin with a space if the file is silent."""
    respelled = {_respell(token): i for token, i in vocabulary.ids().items()}
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    pairs = [_pair(merge) for merge in vocabulary.merges] if vocabulary.merges else _derived(vocabulary, respelled)
    try:
        model = BPE(respelled, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # as in `_byte_level`
        raise vocabulary.error(f"has merges that do not fit its tokens ({str(error)[:100]})") from None
    backend = Tokenizer(model)
    stated = vocabulary.value("add_space_prefix")
    prefix = prefix if stated is None else stated is not False
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _respell(token: str) -> str:
    """Runs of spaces are stored as they are; in the vocabulary they are spelled like other spaces."""
    return _SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token


def _derived(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: the pair with the best joined token comes first.

    Tokens are ranked by their scores. Files of Gemma do not hold those of the vocabulary: it lists its tokens in order.
    """
    scores = vocabulary.scores
    if str(vocabulary.header.metadata.get("general.architecture")).startswith("gemma"):
        scores = [0.0] * len(vocabulary.tokens)
    if scores is None:
        raise vocabulary.error("has neither merges nor scores")
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            if left is not None and (right := ids.get(token[cut:])) is not None:
                merges.append((-scores[i], i, left, right, token[:cut], token[cut:]))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: Any, vocabulary: _Vocabulary, kind: str) -> None:
    """Make control tokens special, and keep those that are marked as user-defined whole."""
    ids, special, plain = backend.get_vocab(), [], []
    for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if not token or token not in ids:
            continue
        if type_ == _CONTROL or (type_ == _UNKNOWN and kind == "llama"):
            special.append(AddedToken(token, normalized=False, special=True))
        elif type_ == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _templates(header: GgufHeader) -> str | dict[str, str] | None:
    """The chat template, or the named ones."""
    main = header.metadata.get("tokenizer.chat_template")
    names = header.metadata.get("tokenizer.chat_templates")
    templates = {"default": main} if isinstance(main, str) else {}
    for name in names if isinstance(names, list) else ():
        template = header.metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(template, str):
            templates[str(name)] = template
    return templates["default"] if list(templates) == ["default"] else templates or None


def gguf_end_ids(header: GgufHeader) -> frozenset[int]:
    """Ids that end a sequence or a turn."""
    tokens, types = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    stated = [header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    size = len(tokens) if isinstance(tokens, list) else 0
    ids = {each for each in stated if type(each) is int and 0 <= each < size}
    if isinstance(tokens, list) and isinstance(types, memoryview):
        ids |= {
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if token in _TURN_ENDS and kind == _CONTROL
        }
    return frozenset(ids)


def gguf_sampling(header: GgufHeader) -> dict[str, Any]:
    """Sampling defaults that the file states, by the names of generation_config.json."""
    settings = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: decimal(value) if type(value) is float else value for name, value in settings.items() if value is not None
    }
