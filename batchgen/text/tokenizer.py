"""The model's tokenizer: text and conversations to token ids, token ids to text.

A thin typed wrapper of a Rust tokenizer loaded through transformers. `clean_up_tokenization_spaces` is never applied,
since it alters code and JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from batchgen.errors import ErrorCode, ErrorInfo, ModelError, RowError
from batchgen.request.prompts import ChatPrompt
from batchgen.text.byte_level import ByteLevelTokens
from batchgen.text.chat import (
    PARTS_PROBE,
    PlainRenderer,
    check_template_reads,
    names_variable,
    plain_renderer,
    prepare_messages,
    reads_parts,
    template_inputs,
)
from batchgen.text.generation_config import GenerationConfig, load_generation_config

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_OTHER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


class Tokenizer:
    """A tokenizer with its chat template and the end-of-sequence ids of its model."""

    def __init__(self, hf: Any, folder: Path, generation: GenerationConfig | None = None) -> None:
        """Wrap `hf`, a transformers tokenizer with a Rust backend, loaded from `folder`."""
        self._hf = hf
        self._rust = hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.folder = folder
        self.generation = generation if generation is not None else load_generation_config(folder)
        self.prefix_ids = self._probe_prefix()
        """Ids that the tokenizer puts in front of raw text: its BOS, or none."""
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        self.eos_ids = self.generation.eos_ids | ({hf.eos_token_id} if hf.eos_token_id is not None else set())
        """End-of-sequence ids of generation_config.json and of the tokenizer."""
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Highest token id plus one; the model's vocabulary is often padded beyond it."""
        decoder = json.loads(self._rust.decoder.__getstate__()) if self._rust.decoder is not None else {}
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
        self._keep_parts: bool | None = None
        self._offset_backend: Any = None

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None, model: str | Path | None = None) -> Tokenizer:
        """Load from a local folder, or from the local cache by model id. No network access, no remote code.

        `model` is the model whose generation_config.json to read, if it is in another folder than the tokenizer.

        Raises:
            ModelError: the folder or its tokenizer is missing, damaged or has no Rust backend.
        """
        folder = _find_folder(path, revision)
        if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
            raise ModelError(f"{path} holds no tokenizer (none of {', '.join(_VOCABULARY_FILES[:3])}, ...)")
        # Imported here: transformers is slow to import, and commands that need no model start without it.
        from transformers import AutoTokenizer

        try:
            known = {} if (config := plain_config(folder)) is None else {"config": config}
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **known)
        except Exception as error:  # a damaged file may raise anything
            raise ModelError(f"the tokenizer of {path} cannot be loaded: {_first_line(error)}") from error
        if not getattr(hf, "is_fast", False):
            raise ModelError(f"the tokenizer of {path} ({type(hf).__name__}) has no fast form (tokenizer.json)")
        return cls(hf, folder, load_generation_config(_find_folder(model, revision)) if model is not None else None)

    def _probe_prefix(self) -> list[int]:
        if not self._rust.encode("a", add_special_tokens=False).ids:
            return []
        full = self._rust.encode("a", add_special_tokens=True)
        return [
            token for token, _ in takewhile(lambda pair: pair[1], zip(full.ids, full.special_tokens_mask, strict=True))
        ]

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
        """
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_continuations(self, prompt: str, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Ids of `prompt + text` for each text, nothing added, and the number of tokens that end inside the prompt."""
        if self._offset_backend is None:
            # Post-processors may trim spaces off token offsets; a copy without one gives the true ends.
            state = json.loads(self._rust.to_str())
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
                `unsupported_field`: the template does not read `tools`, `tool_calls` or a `chat_template_kwargs` name.
        """
        if not self.has_chat_template:
            message = "the model has no chat template; give the prompt as `text`"
            raise RowError(ErrorCode.INVALID_FIELD, f"`messages` cannot be rendered: {message}", "messages")
        messages = prepare_messages(prompt.messages, keep_parts=self._template_reads_parts())
        tools = list(prompt.tools) if prompt.tools else None
        try:
            asked = template_inputs(prompt)
            if asked:
                check_template_reads(self._hf.get_chat_template(tools=tools), asked)
            rendered = self._hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                tokenize=False,
                **prompt.template_kwargs,
            )
        except RowError:
            raise
        except Exception as error:  # a template may raise anything about any message
            reason = _first_line(error)
            raise RowError(
                ErrorCode.INVALID_FIELD,
                f"`messages` cannot be rendered by the model's chat template: {reason}",
                "messages",
            ) from None
        return str(rendered)

    def render_chats(self, prompts: Sequence[ChatPrompt]) -> list[str | ErrorInfo]:
        """Text of each conversation as by `render_chat`, or its error.

        Plain conversations go directly to the template. Others without settings go to the library in one call, since
        its preparation of a call costs more than a conversation.
        """
        renderer = self._renderer if prompts else None
        texts: list[Any] = [renderer.render(one) if renderer else None for one in prompts]
        remaining = [index for index, text in enumerate(texts) if text is None]
        plain = [index for index in remaining if _has_default_settings(prompts[index])]
        batched = dict(zip(plain, self._render_batch([prompts[index] for index in plain]), strict=False))
        for index in remaining:
            texts[index] = batched[index] if index in batched else self._render_one(prompts[index])
        return texts

    @cached_property
    def _renderer(self) -> PlainRenderer | None:
        return plain_renderer(self._hf) if self.has_chat_template else None

    def _render_batch(self, prompts: Sequence[ChatPrompt]) -> list[str]:
        """Texts of conversations without settings; [] if any of them fails."""
        if not prompts or not self.has_chat_template:
            return []
        keep_parts = self._template_reads_parts()
        try:
            messages = [prepare_messages(prompt.messages, keep_parts=keep_parts) for prompt in prompts]
            rendered = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # rendering one at a time finds the conversation that fails
            return []
        return [str(text) for text in rendered]

    def _render_one(self, prompt: ChatPrompt) -> str | ErrorInfo:
        try:
            return self.render_chat(prompt)
        except RowError as error:
            return error.info

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._hf.chat_template)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template, or one of several, names a variable; false without a template."""
        template = self._hf.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        return any(names_variable(text, name) for text in texts)

    def _template_reads_parts(self) -> bool:
        if self._keep_parts is None:
            try:
                self._keep_parts = reads_parts(self._hf.apply_chat_template(PARTS_PROBE, tokenize=False))
            except Exception:  # a template that fails on parts expects strings
                self._keep_parts = False
        return self._keep_parts

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

    @property
    def digest(self) -> str:
        """SHA-256 of the names and contents of the tokenizer's files."""
        digest = hashlib.sha256()
        for name in sorted((*_VOCABULARY_FILES, *_OTHER_FILES)):
            path = self.folder / name
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode())
                digest.update(content)
        return digest.hexdigest()

    @property
    def template_digest(self) -> str | None:
        """SHA-256 of the chat template; None if the model has none."""
        template = self._hf.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _find_folder(path: str | Path, revision: str | None = None) -> Path:
    """Folder of a model, given as a folder or as a hub id in the local cache. Nothing is downloaded.

    Raises:
        ModelError: `path` is neither a folder nor a cached model.
    """
    if Path(path).is_dir():
        return Path(path)
    # Imported here: only hub ids need the library.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except Exception as error:  # not a valid id, or not in the cache
        raise ModelError(f"{path} is neither a model folder nor a model in the local cache") from error


def plain_config(folder: Path) -> Any:
    """Minimal model configuration with which transformers chooses the tokenizer's class.

    Without a configuration the library builds the one of the model type, which imports slow modules. None if
    tokenizer_config.json does not name the class, or custom code takes part in the choice.
    """
    from transformers import PreTrainedConfig  # as in `Tokenizer.load`

    tokenizer, model = _json_object(folder / "tokenizer_config.json"), _json_object(folder / "config.json")
    if not isinstance(tokenizer.get("tokenizer_class"), str) or "auto_map" in tokenizer:
        return None
    if not isinstance(model.get("model_type"), str) or "auto_map" in model:
        return None
    kept = {key: model[key] for key in ("model_type", "model_name", "tokenizer_class") if key in model}
    return PreTrainedConfig(name_or_path=str(folder), **kept)


def _json_object(path: Path) -> dict[str, Any]:
    """JSON object in a file; {} if the file is missing or damaged, which the library reports when it loads."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _has_default_settings(prompt: ChatPrompt) -> bool:
    """Whether a conversation consists of messages alone, without settings that differ from the default."""
    settings = template_inputs(prompt) or prompt.continue_final_message
    return bool(prompt.messages) and not settings and prompt.add_generation_prompt


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
