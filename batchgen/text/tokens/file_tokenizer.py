"""The tokenizer of a folder as its tokenizer.json has it, without transformers, which takes long to import.

transformers builds a tokenizer in a class that depends on the folder. Some classes take tokenizer.json as it is, others
replace parts of it, and each adds the special tokens that other files name. A folder is read here only where all of
this changes nothing: the class is one of two, the keys of the other files are known, and tokenizer.json has the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from batchgen.request.foreign_text import read_json
from batchgen.text.tokens.model_files import json_object

_MAIN: Final = "tokenizer.json"
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_WITHOUT_EFFECT: Final = frozenset(
    (
        "tokenizer_class", "model_max_length", "clean_up_tokenization_spaces", "add_bos_token", "add_eos_token",
        "add_prefix_space", "padding_side", "truncation_side", "truncation_strategy", "max_length", "stride",
        "pad_to_multiple_of", "pad_token_type_id", "model_input_names", "errors", "legacy", "sp_model_kwargs",
        "use_default_system_prompt", "spaces_between_special_tokens", "processor_class", "chat_template",
        "response_template", "added_tokens_decoder", "backend", "is_local", "local_files_only", "name_or_path",
        "tokenizer_file", "special_tokens_map_file",
    )
)  # fmt: skip
"""Keys of tokenizer_config.json that change no token, id or text of what a class takes from tokenizer.json."""
_OTHER_SOURCES: Final = ("tekken.json", "additional_chat_templates")
"""Files from which transformers takes a tokenizer of another kind, or more templates."""

_NOT_SPLIT: Final = ("split_special_tokens", False)
_TYPES: Final = ("llama", "llava", "mistral", "qwen3")
"""Types of models for which transformers takes a class that reads the file as it is, if the folder names one."""
_PLAIN: Final = "TokenizersBackend"
"""The class that takes the file as it is."""
_PLAIN_NAMES: Final = (_PLAIN, "PreTrainedTokenizer")
_LLAMA: Final = "LlamaTokenizer"
_QWEN: Final = "Qwen2Tokenizer"
_MISTRAL_NOTED: Final = 100_000
"""Tokens of a Mistral vocabulary above which transformers tells that the file may split texts wrongly."""

_QWEN_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_PARTS: Final[Mapping[str, Any]] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    },
    "decoder": {"type": "ByteLevel"},
}
"""What the class has in place of the file's parts, without the settings that change neither ids nor texts."""
_QWEN_UNSET: Final = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
"""Settings of the model that the class leaves unset."""
_QWEN_DEFAULTS: Final[Mapping[str, Any]] = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")


class _Unlike(Exception):
    """transformers may make something else of the folder than its tokenizer.json."""


@dataclass
class FileTokenizer:
    """What the program reads of a tokenizer of transformers."""

    backend_tokenizer: Any
    """The Rust tokenizer."""
    special_tokens_map: Mapping[str, str]
    """Name of a special token, such as `bos_token` -> its text."""
    chat_template: str | dict[str, str] | None
    response_template: Mapping[str, Any] | None = None
    is_fast: bool = True
    vocab_files_names: Mapping[str, str] = field(default_factory=dict)
    """Files that it is made of in addition to those of every tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end of a sequence; None if there is none."""
        token = self.special_tokens_map.get("eos_token")
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found


def load_file_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder; None where transformers might make another one of it.

    Raises:
        Exception: the Rust library cannot read tokenizer.json.
    """
    described, model = json_object(folder / "tokenizer_config.json"), json_object(folder / "config.json")
    if not (folder / _MAIN).is_file() or any((folder / name).exists() for name in _OTHER_SOURCES):
        return None
    try:
        kind = _class(described, model)
        from tokenizers import Tokenizer  # folders without the file need it not

        backend = Tokenizer.from_file(str(folder / _MAIN))
        # A token that the file names twice would be added once more.
        named = (folder / _MAIN).read_bytes().count(b'"single_word"')
        if backend.padding is not None or named != len(backend.get_added_tokens_decoder()):
            return None
        special = _special_tokens(folder, described, backend, kind)
        if kind == _QWEN:
            _check_qwen(described, backend)
        elif model["model_type"] == "mistral" and backend.get_vocab_size() > _MISTRAL_NOTED:
            return None
        return FileTokenizer(backend, special, _chat_template(folder, described), described.get("response_template"))
    except _Unlike:
        return None


def _class(described: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The class that transformers takes, `_PLAIN` or `_QWEN`."""
    name, model_type = described.get("tokenizer_class"), model.get("model_type")
    if "auto_map" in described or "auto_map" in model or "model_name" in model or not isinstance(name, str):
        raise _Unlike
    name = name.removesuffix("Fast")
    if name == _QWEN and model_type in ("llama", "qwen2", "qwen3"):
        return _QWEN
    is_plain = name in _PLAIN_NAMES or (name == _LLAMA and model_type == "mistral")  # which passes over Llama's class
    if model_type not in _TYPES or not is_plain:
        raise _Unlike
    return _PLAIN


def _special_tokens(folder: Path, described: Mapping[str, Any], backend: Any, kind: str) -> dict[str, str]:
    """The special tokens by name, each of which the Rust tokenizer has as one."""
    known = {str(i): token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
    sources = [described]
    if "added_tokens_decoder" not in described:  # an older folder
        own = folder / "special_tokens_map.json"
        sources.append(json_object(own))
        if (folder / "added_tokens.json").exists() or (own.exists() and not sources[-1]):
            raise _Unlike
    elif not isinstance(stated := described["added_tokens_decoder"], dict) or not stated.items() <= known.items():
        raise _Unlike
    values = dict(_QWEN_DEFAULTS) if kind == _QWEN else {}
    listed: list[Any] = []
    for source in sources:
        for key, value in source.items():
            if source is described and (key in _WITHOUT_EFFECT or (key, value) == _NOT_SPLIT):
                continue
            if key in _LISTS and isinstance(value, list):
                listed += value
            elif key.endswith("_token"):
                # A dictionary is marked as a token in the one file, and not in the other.
                is_token = isinstance(value, dict) and ("__type" in value) == (source is described)
                values[key] = value.get("content") if is_token else value
            elif value is not None:
                raise _Unlike
    names = (*_NAMED, *(key for key in values if key not in _NAMED))
    special = {name: values[name] for name in names if values.get(name) is not None}
    names_of_special = {state["content"] for state in known.values() if state["special"]}
    if not all(isinstance(text, str) and text in names_of_special for text in (*special.values(), *listed)):
        raise _Unlike
    return special


def _check_qwen(described: Mapping[str, Any], backend: Any) -> None:
    """Check that the parts that Qwen's class replaces, and the tokens that it adds, are those of the file."""
    added = {i: token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
    model, size = backend.model, backend.get_vocab_size(with_added_tokens=False)
    new = sorted(i for i, token in added.items() if model.token_to_id(token["content"]) is None)
    is_same = (
        described.get("added_tokens_decoder") == {str(i): token for i, token in added.items()}
        and new == [*range(size, size + len(new))]
        and all(token == _as_special(token["content"]) for token in added.values() if token["special"])
        and not described.get("add_prefix_space")
        and type(model).__name__ == "BPE"
        and not any(getattr(model, name) for name in _QWEN_UNSET)
        and all(_has(_state(getattr(backend, name)), part) for name, part in _QWEN_PARTS.items())
    )
    if not is_same:
        raise _Unlike


def _as_special(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **flags, "special": True}


def _state(part: Any) -> Any:
    return None if part is None else read_json(part.__getstate__())


def _has(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is as wanted, apart from keys of objects that are not."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_has(value.get(key), each) for key, each in wanted.items())
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_has, value, wanted))
    return bool(value == wanted)


def _chat_template(folder: Path, described: Mapping[str, Any]) -> str | dict[str, str] | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = described.get("chat_template")
    if isinstance(template, list) and all(_has_texts(each, "name", "template") for each in template):
        return {each["name"]: each["template"] for each in template}
    if not isinstance(template, str | None):
        raise _Unlike
    return template


def _has_texts(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in keys)
