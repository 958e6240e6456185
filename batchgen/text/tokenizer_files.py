"""Vocabulary files of a tokenizer's folder: which format they are, and what is missing to read it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from batchgen.errors import ModelError

_MAIN: Final = "tokenizer.json"
_SENTENCEPIECE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_PAIR: Final = ("vocab.json", "merges.txt")
_TEKKEN: Final = "tekken.json"
VOCABULARY_FILES: Final = (_MAIN, *_SENTENCEPIECE, "vocab.json", "vocab.txt", "tiktoken.model", _TEKKEN)
_TIKTOKEN_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s")
"""A line of a tiktoken vocabulary: a token in base64 and its number."""
_SAMPLES: Final = ("The quick brown fox jumps over the lazy dog.", "Prices: 1,234.50 for 2 cafés, naïve 東京", "a b c")
"""Texts on which a converted vocabulary is compared with its own library."""


def check_vocabulary(folder: Path, path: object) -> None:
    """Check that a folder has a vocabulary that can be read here; `path` is how the user named it.

    Raises:
        ModelError: it has none, only a part of one, or one of a format that needs a package or a conversion.
    """
    if (folder / _MAIN).is_file():
        return
    convert = f"Get {_MAIN} from the model's page, or name another tokenizer with --tokenizer"
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
    found = [name for name in _PAIR if (folder / name).is_file()]
    if len(found) == 1:
        lacks = next(name for name in _PAIR if name not in found)
        raise ModelError(f"the tokenizer of {path} has {found[0]} but lacks {lacks}. Copy the folder again")
    if found or (folder / "vocab.txt").is_file():
        return
    tiktoken = next((file.name for file in sorted(folder.glob("*tiktoken*")) if file.is_file()), None)
    if tiktoken is not None:
        raise ModelError(f"{path} has a tiktoken vocabulary ({tiktoken}) and no {_MAIN}. {convert}")
    if (folder / _TEKKEN).is_file():
        raise ModelError(f"{path} has a vocabulary in Mistral's own format ({_TEKKEN}) and no {_MAIN}. {convert}")
    raise ModelError(f"{path} holds no tokenizer (none of {', '.join(VOCABULARY_FILES[:3])}, ...)")


def load_pair(folder: Path) -> Any:
    """The transformers tokenizer of byte-level BPE files without a description; None if the folder has others."""
    if (folder / _MAIN).is_file() or not all((folder / name).is_file() for name in _PAIR):
        return None
    from transformers import GPT2Tokenizer  # as in `Tokenizer.load`

    # Its own special tokens would be added to the vocabulary.
    return GPT2Tokenizer.from_pretrained(str(folder), bos_token=None, eos_token=None, unk_token=None)


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
    for text in _SAMPLES:
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
