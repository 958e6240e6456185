"""Images and audio in the configuration of a checkpoint: the library's class, and what its text decoder does with
their features.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from batchgen.errors import ModelError, first_line
from batchgen.models.architectures import packed_types
from batchgen.models.base import Bidirectional
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.text_part import is_packed
from batchgen.models.library.text import (
    decoder_config,
    feature_blocks,
    library_class,
    rope_settings,
    unset_quantisation,
    whole_config,
)
from batchgen.request.foreign_text import read_json_file, typed

_SEE_ONE_ANOTHER: Final = {"gemma3": None, "shieldgemma2": None, "gemma4": "vision", "gemma4_unified": "vision"}
"""Types whose image features see one another -> the value of the decoder's setting with which they do, None: always."""
PREFIXED: Final = frozenset(("paligemma",))
"""Types all of whose prompt sees one another if it has an image. Their processor writes BOS behind the last image, and
a line break at the end."""
UNSUPPORTED: Final[dict[str, str]] = {
    "mllama": "its decoder attends to images in separate layers, which text does not have",
    "molmo2": "its tokens of images see one another by another mask than Gemma's",
    "ernie4_5_vl_moe": "features of images have separate experts",
    **dict.fromkeys(("chameleon", "emu3", "janus"), "its images become tokens of a codebook"),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "its processor numbers the images of a prompt"),
}
"""Type -> why its images and audio are not computed, though its text is."""
_AUDIO: Final = "[AUDIO]"
"""The token of a feature, and the placeholder of a sound."""
_BEGIN: Final = "[BEGIN_AUDIO]"
"""The token in front of a sound's features."""
_FRAMES: Final = 8
"""Frames of the spectrogram that become one feature: two by a convolution, and four of these are joined."""


@dataclass(frozen=True, slots=True)
class MediaTraits:
    """Treatment of the features of images by a text decoder. See the fields of the same names of `ModelSpec`."""

    rope_axes: int = 0
    deepstack: int = 0
    bidirectional: Bidirectional | None = None


def media_config(folder: ModelFolder) -> Any | str:
    """The library's configuration of the class that reads images or audio; else why the checkpoint reads none."""
    if not is_packed(folder.config) and folder.model_type not in packed_types():
        return f"{folder.model_type} models read text alone"
    if folder.is_gguf:
        return "a GGUF file holds the text decoder alone: use the checkpoint in safetensors"
    if folder.model_type not in packed_types():
        return f"the installed transformers has no class for {folder.model_type} that reads images or audio"
    if folder.model_type in UNSUPPORTED:
        return f"{folder.model_type}: {UNSUPPORTED[folder.model_type]}"
    config = whole_config(folder)
    unset_quantisation(config)
    thinker = getattr(config, "thinker_config", None)
    return config if thinker is None else thinker


def media_traits(folder: ModelFolder) -> MediaTraits:
    """Traits of the text decoder of a checkpoint; plain for those that read no images or audio."""
    config = media_config(folder)
    if isinstance(config, str):
        return MediaTraits()
    text = decoder_config(config)
    sections = [len(section) for section in _sections(text)]
    levels = feature_blocks(config) or getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)
    inner, kind = _inner_class(config), str(config.model_type)
    needed = _SEE_ONE_ANOTHER.get(kind)
    has_runs = kind in _SEE_ONE_ANOTHER and needed in (None, text.use_bidirectional_attention)
    return MediaTraits(
        rope_axes=max(sections, default=3) if hasattr(inner, "get_rope_index") else 0,
        deepstack=len(levels or ()),
        bidirectional="prompt" if kind in PREFIXED else "image" if has_runs else None,
    )


def _sections(text: Any) -> list[Any]:
    """Frequencies by axis of each set of rope settings that has several axes."""
    return [settings["mrope_section"] for settings in rope_settings(text) if settings.get("mrope_section")]


def _inner_class(config: Any) -> Any:
    """The class inside that with the head, which joins features and text; the class itself if it has none inside."""
    from transformers import MODEL_MAPPING  # the library takes seconds to import

    outer = library_class(config)
    if hasattr(outer, "get_rope_index") or type(config) not in MODEL_MAPPING:
        return outer
    return MODEL_MAPPING[type(config)]


def read_processor(folder: ModelFolder, config: Any) -> tuple[Any, dict[str, str]]:
    """The library's processor without the parts that cannot be read, and why they cannot.

    A part may need a package that is missing, as processors of videos need torchvision; the others do without it.
    """
    options: Any = {"local_files_only": True, "trust_remote_code": False}
    cls = processor_class(_processor_name(folder, config))
    if config.model_type == "voxtral":
        cls = with_sounds(cls)
    values, _ = cls.get_processor_dict(folder.path, **options)
    parts: list[Any] = []
    missing: dict[str, str] = {}
    for name in cls.get_attributes():
        only = {"get_attributes": classmethod(lambda _, name=name: [name]), "__module__": cls.__module__}
        loader: Any = type(cls.__name__, (cls,), only)
        try:
            parts += loader._get_arguments_from_pretrained(folder.path, values, **options)
        except Exception as error:  # constructors of many authors raise errors of many types
            if "tokenizer" in name:
                raise
            missing[name] = first_line(error)
            parts.append(None)

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name in missing else cls.check_argument_for_proper_class(self, name, argument)

    body = {
        "_get_arguments_from_pretrained": classmethod(lambda *_, **__: parts),
        "check_argument_for_proper_class": check,
        "__module__": cls.__module__,
    }
    reduced: Any = type(cls.__name__, (cls,), body)
    return reduced.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False), missing


def processor_class(name: str) -> Any:
    """The library's class of that name.

    Without torchvision the library has no class whose module takes a function from a module that needs it. The module
    of the image processor without torchvision has the same function.
    """
    import transformers  # the library takes seconds to import

    cls = getattr(transformers, name)
    if issubclass(cls, transformers.ProcessorMixin):
        return cls
    module = str(cls.__module__)
    images = module.replace(".processing_", ".image_processing_")
    with suppress(ImportError):
        pil = importlib.import_module(module.replace(".processing_", ".image_processing_pil_"))
        sys.modules[images] = pil
        try:
            cls = getattr(importlib.import_module(module), name)
        finally:
            del sys.modules[images]
    return cls


def _processor_name(folder: ModelFolder, config: Any) -> str:
    """The class that a folder's files name, else that of its type.

    Raises:
        ModelError: the folder has no processor.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # as in _read_processor

    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        values = typed(read_json_file(folder.path / file), {}) if (folder.path / file).is_file() else {}
        if isinstance(values.get("processor_class"), str):
            return str(values["processor_class"])
    for kind in (folder.model_type, str(config.model_type)):
        if PROCESSOR_MAPPING_NAMES.get(kind):
            return str(PROCESSOR_MAPPING_NAMES[kind])
    raise ModelError(f"neither its files nor the type {folder.model_type} name one")


def with_sounds(library: Any) -> Any:
    """Voxtral's processor with a call that takes sounds next to a text, which the library has in mistral-common alone.

    As in mistral-common, a sound is padded to whole chunks of 30 seconds, whose features follow `[BEGIN_AUDIO]`.
    """

    def build(self: Any, feature_extractor: Any, tokenizer: Any) -> None:
        self.audio_token, self.audio_token_id = _AUDIO, tokenizer.convert_tokens_to_ids(_AUDIO)
        super(library, self).__init__(feature_extractor, tokenizer)

    def call(
        self: Any,
        text: list[str],
        audio: Sequence[Any] = (),
        sampling_rate: int | None = None,
        return_tensors: str = "pt",
    ) -> dict[str, Any]:
        reader, sounds = self.feature_extractor, dict[str, Any]()
        before, *after = text[0].split(_AUDIO)
        each = -(-reader.nb_max_frames // _FRAMES)  # features of a chunk
        counts = [each * -(-len(sound) // reader.n_samples) for sound in audio]
        parts = (f"{_BEGIN}{_AUDIO * count}{rest}" for count, rest in zip(counts, after, strict=True))
        if audio:
            whole = {"padding": True, "truncation": False, "pad_to_multiple_of": reader.n_samples}
            features = self._retrieve_input_features(
                audio, reader.nb_max_frames, sampling_rate=sampling_rate, return_tensors=return_tensors, **whole
            )
            sounds = {"input_features": features}
        made = self.tokenizer(["".join((before, *parts))], return_tensors=return_tensors, add_special_tokens=False)
        return {**made, **sounds}

    return type(library.__name__, (library,), {"__init__": build, "__call__": call, "__module__": library.__module__})
