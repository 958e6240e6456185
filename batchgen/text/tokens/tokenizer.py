"""The model's tokenizer: text and conversations to token ids, token ids to text.

A thin typed wrapper of a Rust tokenizer, loaded through transformers unless tokenizer.json is all of it.
`clean_up_tokenization_spaces` is never applied, since it alters code and JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from batchgen.errors import ErrorCode, ErrorInfo, ModelError, RowError, UsageError, library_errors
from batchgen.gguf.header import SUFFIX, read_gguf
from batchgen.library_settings import short_openmp_spins
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.foreign_text import read_json
from batchgen.text.chat.conversation import ChatRenderer
from batchgen.text.chat.template import ChatTemplate, processor_template
from batchgen.text.chat.template_probe import Written, written
from batchgen.text.tokens.file_tokenizer import load_file_tokenizer
from batchgen.text.tokens.model_files import (
    SAMPLES,
    VOCABULARY_FILES,
    GenerationConfig,
    check_conversion,
    check_vocabulary,
    load_generation_config,
    load_pair,
    plain_config,
)

_OTHER_FILES = (
    "added_tokens.json",
    "config.json",  # the class of the tokenizer may follow from it
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)

_NO_TEMPLATE = ErrorInfo(
    ErrorCode.INVALID_FIELD,
    "`messages` cannot be rendered: the model has no chat template; give the prompt as `text`",
    "messages",
)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is spelled as itself, other bytes from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_alphabet()


class ByteLevelTokens(dict[int, bytes]):
    """Token id -> its bytes, filled on first use; ids past the vocabulary have none.

    A token with a character outside the byte alphabet (an added token) has the UTF-8 of its spelling, as in the
    backend.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        spelled: str = self._backend.id_to_token(token) or ""
        try:
            piece = bytes(_ALPHABET[character] for character in spelled)
        except KeyError:
            piece = spelled.encode()
        self[token] = piece
        return piece


class Tokenizer:
    """A tokenizer with its chat template and the end-of-sequence ids of its model."""

    def __init__(self, hf: Any, folder: Path, generation: GenerationConfig | None = None) -> None:
        """Wrap `hf`, a `FileTokenizer` or a transformers tokenizer with a Rust backend, loaded from `folder`."""
        self._hf = hf
        self._stamps = _stamps(folder)
        self._header_digest: str | None = None
        self._rust = hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_batch_fast(list(SAMPLES))  # raises now what every row would meet
        self.folder = folder
        self.generation = generation if generation is not None else load_generation_config(folder)
        self.prefix_ids = self._probe_prefix()
        """Ids that the tokenizer puts in front of raw text: its BOS, or none."""
        self.added_ids = frozenset(added := self._rust.get_added_tokens_decoder())
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        self.eos_ids = self.generation.eos_ids | ({hf.eos_token_id} if hf.eos_token_id is not None else set())
        """End-of-sequence ids of generation_config.json and of the tokenizer."""
        self.vocab_size = self._count_ids()
        """Highest token id plus one; the model's vocabulary is often padded beyond it."""
        decoder = read_json(self._rust.decoder.__getstate__()) if self._rust.decoder is not None else {}
        self.byte_level_tokens = ByteLevelTokens(self._rust) if decoder.get("type") == "ByteLevel" else None
        """Token id -> bytes for a byte-level tokenizer whose decoder does nothing else; None for any other."""
        decoder_types = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
        self.vocab_bytes = ByteLevelTokens(self._rust) if "ByteLevel" in decoder_types else None
        """Token id -> bytes for any byte-level vocabulary, even if the decoder has further steps; else None."""
        self.byte_fallback = "ByteFallback" in decoder_types
        """Whether tokens such as `<0xE2>` are single bytes."""
        self.decode_prefix = self._find_decode_prefix()
        """Ids of a word to decode in front of an output, for decoders that strip the first leading space; else ()."""
        self.decode_prefix_text = self.decode(self.decode_prefix)
        self._offset_backend: Any = None
        self.clock = datetime.now().replace(microsecond=0)
        """Time that the chat template sees; a job sets it before it renders a conversation."""
        self.template = ChatTemplate(hf, lambda: self.clock) if hf.chat_template else None
        self._chat = None if self.template is None else ChatRenderer(self.template)

    @classmethod
    def load(
        cls,
        path: str | Path,
        revision: str | None = None,
        model: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Load from a local folder, or from the local cache by model id. No network access, no remote code.

        `model` is the model whose generation_config.json to read, if it is in another folder than the tokenizer, and
        `config` its configuration, if that is not the one of its config.json.

        Raises:
            ModelError: the folder or its tokenizer is missing, damaged or has no Rust backend.
        """
        folder = _find_folder(path, revision)
        if folder.is_file():
            return cls._from_gguf(folder, model)
        check_vocabulary(folder, path)
        with _guard(path):
            stamps = _stamps(folder)
            hf = load_file_tokenizer(folder) or _load_with_library(folder)
            hf.chat_template = hf.chat_template or processor_template(folder)
            if not getattr(hf, "is_fast", False):
                raise ModelError(f"the tokenizer of {path} ({type(hf).__name__}) has no fast form (tokenizer.json)")
            check_conversion(hf.backend_tokenizer, folder, path)
            generation = load_generation_config(_find_folder(model, revision), config) if model is not None else None
            made = cls(hf, folder, generation)
        made._stamps = stamps  # from before the files were read
        return made

    @classmethod
    def _from_gguf(cls, file: Path, model: str | Path | None) -> Tokenizer:
        stamps, header = _stamps(file), read_gguf(file)
        with _guard(file), short_openmp_spins():  # as in `load`
            from transformers import PreTrainedTokenizerFast

            from batchgen.gguf.vocabulary import gguf_vocabulary

            vocabulary = gguf_vocabulary(header)
            hf = PreTrainedTokenizerFast(
                tokenizer_object=vocabulary.backend, chat_template=vocabulary.chat_template, **vocabulary.special
            )
            made = cls(hf, file, load_generation_config(file if model is None else _find_folder(model)))
        made._stamps, made._header_digest = stamps, header.digest
        return made

    def _count_ids(self) -> int:
        size: int = self._rust.get_vocab_size(with_added_tokens=True)
        if None not in map(self._rust.id_to_token, range(size)):  # faster than to list the vocabulary
            return size
        return max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _probe_prefix(self) -> list[int]:
        if not self._rust.encode("a", add_special_tokens=False).ids:
            return []
        full = self._rust.encode("a", add_special_tokens=True)
        return [
            token for token, _ in takewhile(lambda pair: pair[1], zip(full.ids, full.special_tokens_mask, strict=True))
        ]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer itself puts in front of a text and behind it."""
        before, _, behind, _ = self._parts("a")  # for most tokenizers, `prefix_ids` and nothing
        return before, behind

    @cached_property
    def around_pair(self) -> tuple[list[int], list[int], list[int], bool]:
        """Ids that it puts in front of two texts, between and behind them, and whether the second has another type."""
        return self._parts("a", "a")

    def _parts(self, *texts: str) -> tuple[list[int], list[int], list[int], bool]:
        """Ids around one or two texts as in `around_pair`; those between are empty for one."""
        encoded = self._rust.encode(*texts, add_special_tokens=True)
        ids, of, types = encoded.ids, encoded.sequence_ids, encoded.type_ids
        found = [i for i, text in enumerate(of) if text is not None]
        if not found:
            return [], [], ids, False
        between = [ids[i] for i in range(found[0], found[-1]) if of[i] is None]
        return ids[: found[0]], between, ids[found[-1] + 1 :], len(texts) > 1 and types[found[-1]] > 0

    def _find_decode_prefix(self) -> tuple[int, ...]:
        if self.vocab_bytes is not None:
            return ()
        first = self.encode_plain(["a"])[0][:1]
        # A special token would be left out of the text, and a byte would join other bytes.
        unusable = any(token in self.special_ids or str(self.id_to_token(token)).startswith("<0x") for token in first)
        return () if unusable else tuple(first)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of raw texts, with the BOS in front unless a text begins with it, and without EOS."""
        prefix = self.prefix_ids
        if not prefix:
            return self.encode_plain(texts)
        size = len(prefix)
        return [ids if ids[:size] == prefix else prefix + ids for ids in self.encode_plain(texts)]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, nothing added; special tokens written out in a text are recognised.

        One call uses all cores.

        Raises:
            RowError: `invalid_field`: the library cannot encode a text.
        """
        try:
            encodings = self._rust.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # as of a text with a character that the vocabulary lacks, and nothing for these
            raise RowError(ErrorCode.INVALID_FIELD, f"the text cannot be tokenized: {error}") from error
        return [encoding.ids for encoding in encodings]

    def encode_continuations(self, prompt: str, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Ids of `prompt + text` for each text, nothing added, and the number of tokens that end inside the prompt."""
        if self._offset_backend is None:
            # Post-processors may trim spaces off token offsets; a copy without one gives the true ends.
            state = read_json(self._rust.to_str())
            self._offset_backend = type(self._rust).from_str(json.dumps({**state, "post_processor": None}))
        encodings = self._offset_backend.encode_batch([prompt + text for text in texts], add_special_tokens=False)
        size = len(prompt)
        return [
            (encoding.ids, next((i for i, (_, end) in enumerate(encoding.offsets) if end > size), len(encoding.ids)))
            for encoding in encodings
        ]

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a conversation as rendered by the chat template, which alone decides on a BOS.

        Raises:
            RowError: see `render_chat`.
        """
        return self.encode_plain([self.render_chat(prompt)])[0]

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Text of a conversation, rendered by the model's chat template in the library's sandbox.

        Raises:
            RowError: `invalid_field`: the model has no template, or the template refuses the conversation;
                `unsupported_field`: the template leaves out a part of it.
        """
        (text,) = self.render_chats([prompt])
        if isinstance(text, ErrorInfo):
            raise RowError(*astuple(text))
        return text

    def render_chats(self, prompts: Sequence[ChatPrompt]) -> list[str | ErrorInfo]:
        """Text of each conversation as by `render_chat`, or its error."""
        return [_NO_TEMPLATE] * len(prompts) if self._chat is None else self._chat.render_all(prompts)

    def use_template(self, name: str | None, *, keep_unread: bool = False) -> None:
        """Select the chat template of conversations.

        Args:
            name: its name; None: the one that fits each conversation.
            keep_unread: accept variables that it does not read.

        Raises:
            UsageError: the model has no template of this name.
        """
        known = {} if self.template is None else self.template.named
        if name is not None and name not in known:
            names = ", ".join(map(repr, sorted(known))) or "no chat template"
            raise UsageError(f"`--chat-template-name` is {name!r}, and the model has {names}")
        if self.template is not None and self._chat is not None:
            self.template.name, self._chat.keep_unread = name, keep_unread
            self.__dict__.pop("written", None)

    @cached_property
    def written(self) -> Written | None:
        """What the chat template writes around thoughts, answers and calls; None if there is none."""
        return None if self.template is None else written(self.template)

    @property
    def chat_notes(self) -> list[str]:
        """What users should know of the conversations that were rendered, a line each."""
        return [] if self._chat is None else sorted(self._chat.notes)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template, or one of several, reads a variable; false without a template."""
        return self.template is not None and self.template.reads_variable(name)

    @property
    def clock_text(self) -> dict[str, str] | None:
        """The time as the chat template prints it, by format; None if it does not read the time."""
        return self.template.clock_text if self.template is not None else None

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`; ids past the vocabulary have no text.

        With special tokens kept and `spaces_between_special_tokens` false, special tokens are written out and the
        segments between them decoded separately, so that the decoder puts no space around special tokens.
        """
        if skip_special_tokens or spaces_between_special_tokens or self.special_ids.isdisjoint(ids):
            return str(self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens))
        pieces: list[str] = []
        segment: list[int] = []
        for token in ids:
            if token in self.special_ids:
                pieces += (self._rust.decode(segment, skip_special_tokens=False), self._rust.id_to_token(token))
                segment = []
            else:
                segment.append(token)
        return "".join([*pieces, self._rust.decode(segment, skip_special_tokens=False)])

    def decode_output(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids` after a prompt: `decode` with the leading space of the first word kept."""
        text = self.decode([*self.decode_prefix, *ids], skip_special_tokens, spaces_between_special_tokens)
        return text[len(self.decode_prefix_text) :]

    def token_text(self, token: int) -> str:
        """Text of one token decoded alone; a special token is written out."""
        return str(self._rust.decode([token], skip_special_tokens=False))

    def id_to_token(self, token: int) -> str | None:
        """Spelling of a token in the vocabulary; None past its end."""
        spelled: str | None = self._rust.id_to_token(token)
        return spelled

    def token_to_id(self, spelled: str) -> int | None:
        """Id of a token by its spelling in the vocabulary; None if it does not exist."""
        token: int | None = self._rust.token_to_id(spelled)
        return token

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names and contents of all files that the tokenizer is made from, or of a GGUF file's header.

        Raises:
            ModelError: a file cannot be read, or changed since the tokenizer was loaded.
        """
        if self._header_digest is not None:
            if _stamps(self.folder) != self._stamps:
                raise ModelError(f"{self.folder} changed while it was read. Run the command again")
            return self._header_digest
        digest, named = hashlib.sha256(), {*_OTHER_FILES, *VOCABULARY_FILES, *self._hf.vocab_files_names.values()}
        names = sorted(name for name in self._stamps if name in named or name.startswith("tokenizer"))
        try:
            for name in names:
                content = (self.folder / name).read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
            now = _stamps(self.folder)
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror or error}") from None
        if changed := [name for name in names if now.get(name) != self._stamps[name]]:
            raise ModelError(f"{self.folder / changed[0]} changed while it was read. Run the command again")
        return digest.hexdigest()

    @property
    def template_digest(self) -> str | None:
        """SHA-256 of the chat template; None if the model has none."""
        template = self._hf.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _load_with_library(folder: Path) -> Any:
    with short_openmp_spins():  # the import of sentencepiece, if there is one, brings another OpenMP runtime
        from transformers import AutoTokenizer  # slow to import

        known = {} if (plain := plain_config(folder)) is None else {"config": plain}
        hf = load_pair(folder)
        if hf is None:
            options = {"local_files_only": True, "trust_remote_code": False, **known}
            hf = AutoTokenizer.from_pretrained(str(folder), **options)
    return hf


def _find_folder(path: str | Path, revision: str | None = None) -> Path:
    """Folder of a model, given as a folder, a GGUF file or a hub id in the local cache. Nothing is downloaded.

    Raises:
        ModelError: `path` is neither a folder nor a cached model.
    """
    if Path(path).is_dir() or (Path(path).is_file() and Path(path).suffix == SUFFIX):
        return Path(path)
    from huggingface_hub import snapshot_download  # only hub ids need the library

    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except Exception as error:  # not a valid id, or not in the cache
        raise ModelError(f"{path} is neither a model folder nor a model in the local cache") from error


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time of modification and of change of the files of a folder, by name."""
    files = folder.iterdir() if folder.is_dir() else [folder]
    stats = {path.name: path.stat() for path in files if path.is_file()}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in stats.items()}


def _guard(path: object) -> AbstractContextManager[None]:
    return library_errors(f"the tokenizer of {path} cannot be loaded", "Name another tokenizer with --tokenizer.")
