"""The model's tokenizer: text and conversations to ids, ids to text.

A thin, typed face on a Rust tokenizer loaded through transformers. Text is what the ids say: the clean-up of spaces
before punctuation that some tokenizer configurations ask for is never applied, since it alters code and JSON.
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
from batchgen.prompts import ChatPrompt
from batchgen.text.chat import PARTS_PROBE, check_read, prepare_messages, reads_parts, to_be_read
from batchgen.text.folder import find_folder
from batchgen.text.generation_config import GenerationConfig, load_generation_config
from batchgen.text.pieces import BytePieces
from batchgen.text.render import PlainRenderer, plain_renderer

__all__ = ["Tokenizer"]

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_FURTHER_FILES = (
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
        """Wrap `hf`, a transformers tokenizer with a Rust backend that was loaded from `folder`."""
        self._hf = hf
        self._rust = hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        self.folder = folder
        self.generation = generation if generation is not None else load_generation_config(folder)
        self.prefix_ids = self._probe_prefix()
        """What the tokenizer itself puts before raw text: its BOS, or nothing."""
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        self.eos_ids = self.generation.eos_ids | ({hf.eos_token_id} if hf.eos_token_id is not None else set())
        """Every id that ends a sequence: of generation_config.json and of the tokenizer."""
        self.vocab_size = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One past the highest id; a model's vocabulary is often padded beyond it."""
        decoder = json.loads(self._rust.decoder.__getstate__()) if self._rust.decoder is not None else {}
        self.byte_pieces = BytePieces(self._rust) if decoder.get("type") == "ByteLevel" else None
        """Bytes by token for a byte-level tokenizer; None for any other."""
        kinds = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
        self.spelled_bytes = BytePieces(self._rust) if "ByteLevel" in kinds else None
        """Bytes by token wherever the vocabulary spells bytes, though more may be done to the text after that."""
        self.byte_fallback = "ByteFallback" in kinds
        """Whether tokens such as `<0xE2>` stand for bytes."""
        self.anchor = self._find_anchor()
        """A word to decode others behind, for decoders that take the space off the first; else nothing."""
        self.anchor_text = self.decode(self.anchor)
        self._keep_parts: bool | None = None
        self._spans: Any = None

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None, model: str | Path | None = None) -> Tokenizer:
        """Load from a local folder, or from the local cache by model id. The network is never asked, no code is run.

        `model` is the model it serves, whose generation_config.json counts, where that is another folder.

        Raises:
            ModelError: the folder or its tokenizer is missing, damaged or of a kind without a Rust backend.
        """
        folder = find_folder(path, revision)
        if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
            raise ModelError(f"{path} holds no tokenizer (none of {', '.join(_VOCABULARY_FILES[:3])}, ...)")
        # Imported here: transformers takes two seconds, and commands that need no model start without it.
        from transformers import AutoTokenizer

        try:
            known = {} if (config := plain_config(folder)) is None else {"config": config}
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **known)
        except Exception as error:  # whatever a damaged file makes the library raise
            raise ModelError(f"the tokenizer of {path} cannot be loaded: {_first_line(error)}") from error
        if not getattr(hf, "is_fast", False):
            raise ModelError(f"the tokenizer of {path} ({type(hf).__name__}) has no fast form (tokenizer.json)")
        return cls(hf, folder, load_generation_config(find_folder(model, revision)) if model is not None else None)

    def _probe_prefix(self) -> list[int]:
        if not self._rust.encode("a", add_special_tokens=False).ids:
            return []
        full = self._rust.encode("a", add_special_tokens=True)
        return [
            token for token, _ in takewhile(lambda pair: pair[1], zip(full.ids, full.special_tokens_mask, strict=True))
        ]

    def _find_anchor(self) -> tuple[int, ...]:
        if self.spelled_bytes is not None:
            return ()
        first = self.encode_plain(["a"])[0][:1]
        # Where the vocabulary has no such letter: a special token would be left out, a byte would join others.
        unfit = any(token in self.special_ids or str(self.id_to_token(token)).startswith("<0x") for token in first)
        return () if unfit else tuple(first)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of raw texts: with the tokenizer's BOS in front unless a text begins with it, and no EOS after."""
        prefix = self.prefix_ids
        if not prefix:
            return self.encode_plain(texts)
        size = len(prefix)
        return [ids if ids[:size] == prefix else prefix + ids for ids in self.encode_plain(texts)]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts as they stand, nothing added; special tokens written out in a text are recognised.

        One call encodes on all cores.
        """
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_behind(self, prompt: str, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """Ids of `prompt + text` for each text, nothing added, and how many of them end inside the prompt."""
        if self._spans is None:
            # Post-processors may trim spaces off the spans of tokens; a copy without one tells where each really ends.
            state = json.loads(self._rust.to_str())
            self._spans = type(self._rust).from_str(json.dumps({**state, "post_processor": None}))
        encodings = self._spans.encode_batch([prompt + text for text in texts], add_special_tokens=False)
        size = len(prompt)
        return [
            (encoding.ids, next((i for i, (_, end) in enumerate(encoding.offsets) if end > size), len(encoding.ids)))
            for encoding in encodings
        ]

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Ids of a conversation as the chat template renders it; the template alone decides on a BOS.

        Raises:
            RowError: as `render_chat`.
        """
        return self.encode_plain([self.render_chat(prompt)])[0]

    def render_chat(self, prompt: ChatPrompt) -> str:
        """The text of a conversation, rendered by the model's template in the library's sandbox.

        Raises:
            RowError: `invalid_field` where the model has no template, or it refuses the conversation;
                `unsupported_field` where it does not read `tools`, `tool_calls` or what `chat_template_kwargs` gives.
        """
        if not self.has_chat_template:
            message = "the model has no chat template; give the prompt as `text`"
            raise RowError(ErrorCode.INVALID_FIELD, f"`messages` cannot be rendered: {message}", "messages")
        messages = prepare_messages(prompt.messages, keep_parts=self._template_reads_parts())
        tools = list(prompt.tools) if prompt.tools else None
        try:
            asked = to_be_read(prompt)
            if asked:
                check_read(self._hf.get_chat_template(tools=tools), asked)
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
        """Each conversation as `render_chat` gives it, or what is wrong with it.

        The usual ones go to the template itself. Of the others those without settings of their own are given to the
        library in one call: it prepares every call anew, which takes longer than a conversation does.
        """
        renderer = self._renderer if prompts else None
        texts: list[Any] = [renderer.render(one) if renderer else None for one in prompts]
        left = [index for index, text in enumerate(texts) if text is None]
        plain = [index for index in left if _is_plain(prompts[index])]
        together = dict(zip(plain, self._render_plain([prompts[index] for index in plain]), strict=False))
        for index in left:
            texts[index] = together[index] if index in together else self._render_alone(prompts[index])
        return texts

    @cached_property
    def _renderer(self) -> PlainRenderer | None:
        return plain_renderer(self._hf) if self.has_chat_template else None

    def _render_plain(self, prompts: Sequence[ChatPrompt]) -> list[str]:
        """Conversations without settings; none where anything is wrong with any of them."""
        if not prompts or not self.has_chat_template:
            return []
        keep_parts = self._template_reads_parts()
        try:
            messages = [prepare_messages(prompt.messages, keep_parts=keep_parts) for prompt in prompts]
            rendered = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # which of them it is shows when they are rendered alone
            return []
        return [str(text) for text in rendered]

    def _render_alone(self, prompt: ChatPrompt) -> str | ErrorInfo:
        try:
            return self.render_chat(prompt)
        except RowError as error:
            return error.info

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._hf.chat_template)

    def _template_reads_parts(self) -> bool:
        if self._keep_parts is None:
            try:
                self._keep_parts = reads_parts(self._hf.apply_chat_template(PARTS_PROBE, tokenize=False))
            except Exception:  # a template that fails on parts takes strings
                self._keep_parts = False
        return self._keep_parts

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`; ids past the vocabulary have none.

        With special tokens kept and `spaces_between_special_tokens` false, each special token stands as it is written,
        and the stretches between them are decoded by themselves, so that no decoder puts a space beside one.
        """
        if skip_special_tokens or spaces_between_special_tokens or self.special_ids.isdisjoint(ids):
            return str(self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens))
        pieces: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self.special_ids:
                pieces += (self._rust.decode(run, skip_special_tokens=False), self._rust.id_to_token(token))
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self._rust.decode(run, skip_special_tokens=False)])

    def decode_output(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids` as it stands behind a prompt's: as `decode`, with the space that its first word begins with."""
        text = self.decode([*self.anchor, *ids], skip_special_tokens, spaces_between_special_tokens)
        return text[len(self.anchor_text) :]

    def token_text(self, token: int) -> str:
        """Text of one token decoded alone, special tokens included."""
        return str(self._rust.decode([token], skip_special_tokens=False))

    def id_to_token(self, token: int) -> str | None:
        """The token as the vocabulary spells it; None past its end."""
        spelled: str | None = self._rust.id_to_token(token)
        return spelled

    def token_to_id(self, spelled: str) -> int | None:
        """The id of a token as the vocabulary spells it; None where it has none."""
        token: int | None = self._rust.token_to_id(spelled)
        return token

    @property
    def digest(self) -> str:
        """sha256 over the tokenizer's files, names included."""
        digest = hashlib.sha256()
        for name in sorted((*_VOCABULARY_FILES, *_FURTHER_FILES)):
            path = self.folder / name
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode())
                digest.update(content)
        return digest.hexdigest()

    @property
    def template_digest(self) -> str | None:
        """sha256 of the chat template; None where the model has none."""
        template = self._hf.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def plain_config(folder: Path) -> Any:
    """What the library needs of config.json to choose the tokenizer's class, where tokenizer_config.json names one.

    Given no configuration it would build the model type's own, for which it imports compilers and distributed tensors:
    more than a second. None where its choice takes more than a name.
    """
    from transformers import PreTrainedConfig  # as in `Tokenizer.load`

    named, model = _json_object(folder / "tokenizer_config.json"), _json_object(folder / "config.json")
    if not isinstance(named.get("tokenizer_class"), str) or "auto_map" in named:
        return None
    if not isinstance(model.get("model_type"), str) or "auto_map" in model:
        return None
    kept = {key: model[key] for key in ("model_type", "model_name", "tokenizer_class") if key in model}
    return PreTrainedConfig(name_or_path=str(folder), **kept)


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none, for which the library finds its own words."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_plain(prompt: ChatPrompt) -> bool:
    """Whether nothing but its messages, which any template reads, sets a conversation apart from others."""
    settings = to_be_read(prompt) or prompt.continue_final_message
    return bool(prompt.messages) and not settings and prompt.add_generation_prompt


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
