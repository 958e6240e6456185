"""Which configuration, tensors and head of a checkpoint are those of its text decoder."""

from __future__ import annotations

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from batchgen.errors import ModelError
from batchgen.models.check import check_model
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.checkpoint.text_part import find_text_tensors
from batchgen.models.library.meta import text_class
from batchgen.models.library.text import is_unread, read_transformers_config
from batchgen.models.native.config import NATIVE_TYPES, parse_native_config
from tests.models.dense_attention import DenseCache
from tests.models.loading import inspect_model, load_model
from tests.models.packed import packed_logits, random_sequences
from tests.models.tiny import save_tiny, tiny_model
from tests.models.tiny_packed import save_packed

torch.set_num_threads(1)

Names = dict[str, str]
LAYOUTS: dict[str, tuple[str, Names]] = {
    "kimi_vl": ("text_config", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
    "internvl_chat": ("llm_config", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
    "deepseek_vl_v2": ("language_config", {"model.": "language.model.", "lm_head.": "language.lm_head."}),
    "ovis": ("llm_config", {"model.": "llm.model.", "lm_head.": "llm.lm_head."}),
    "new_vl": ("text_config", {"model.": "model.language_model."}),
    "unprefixed_vl": ("text_config", {}),
}
"""Model types that the library does not have -> key of the nested configuration, and the names of the tensors."""
TOWER = {"vision_tower.blocks.0.weight": torch.ones(8, dtype=torch.int8), "mlp1.0.weight": torch.ones(4)}


def pack(text: Path, folder: Path, model_type: str, key: str, names: Names, **changes: Any) -> Path:
    """Write a checkpoint whose text decoder is that of `text`, with a tower that no text model could read."""
    tensors = load_file(text / "model.safetensors")
    for old, new in names.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    folder.mkdir()
    save_file({**tensors, **TOWER}, folder / "model.safetensors", metadata={"format": "pt"})
    nested = json.loads((text / "config.json").read_text())
    whole = {"model_type": model_type, "architectures": ["NewChatModel"], "auto_map": {"AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps({**whole, key: nested, "vision_config": {}} | changes))
    return folder


TEXTS = ("llama", "qwen2", "deepseek_v3", "gemma2")
PAIRS = [*zip(LAYOUTS, cycle(TEXTS), strict=False)]
"""Each layout with one of the decoders, of the native and of the library's path."""


@pytest.mark.parametrize(
    ("name", "text"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(LAYOUTS, TEXTS) if pair not in PAIRS)],
)
def test_decoders_in_checkpoints_that_the_library_does_not_know_run(name: str, text: str, tmp_path: Path) -> None:
    key, names = LAYOUTS[name]
    folder = pack(save_tiny(text, tmp_path / "text"), tmp_path / "packed", name, key, names)
    model = load_model(folder, dtype="float32", device="cpu", max_model_len=64)
    alone = load_model(tmp_path / "text", dtype="float32", device="cpu", max_model_len=64)
    assert model.spec == alone.spec
    assert model.spec.implementation == ("native" if text in NATIVE_TYPES else "transformers")
    ids = random_sequences(256, lengths=(9, 17))
    with torch.no_grad():
        expected = [tiny_model(text)(input_ids=row[None], use_cache=False).logits[0] for row in ids]
    for ours, theirs in zip(packed_logits(model, ids, DenseCache().step), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(("outer", "inner"), [(True, False), (None, True), (None, None)])
def test_the_outer_configuration_ties_the_head(outer: Any, inner: Any, implementation: Any, tmp_path: Path) -> None:
    text = save_tiny("llama", tmp_path / "text", tie_word_embeddings=True)
    config = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": inner}))
    folder = pack(text, tmp_path / "vl", "new_vl", "text_config", {"model.": "lm."}, tie_word_embeddings=outer)
    model = load_model(folder, dtype="float32", device="cpu", implementation=implementation)
    ids = random_sequences(256, lengths=(9,))
    with torch.no_grad():
        expected = tiny_model("llama", tie_word_embeddings=True)(input_ids=ids[0][None]).logits[0]
    torch.testing.assert_close(packed_logits(model, ids, DenseCache().step)[0], expected, atol=1e-4, rtol=0)


def test_a_lost_head_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    text = save_tiny("llama", tmp_path / "text", tie_word_embeddings=True)
    names = {"model.": "language_model.model."}
    folder = pack(text, tmp_path / "vl", "new_vl", "text_config", names, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks 1 of .*lm_head\.weight"):
        check_model(folder)


def test_extra_tensors_of_the_text_part_are_refused(tmp_path: Path) -> None:
    key, names = LAYOUTS["internvl_chat"]
    folder = pack(save_tiny("llama", tmp_path / "text"), tmp_path / "vl", "internvl_chat", key, names)
    tensors = load_file(folder / "model.safetensors")
    extra = {"language_model.model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"q_norm\.weight"):
        check_model(folder)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "phi4_multimodal", "qwen2_5_omni_thinker", "llava"])
def test_towers_are_not_read_nor_counted(name: str, tmp_path: Path) -> None:
    """What is packed with the text may be stored in any form, and takes no memory."""
    save_packed(name, tmp_path)
    spec = inspect_model(tmp_path, dtype="float32", device="cpu", max_model_len=64)
    tensors = load_file(tmp_path / "model.safetensors")
    towers = ("vision", "visual", "audio", "multi_modal", "model.embed_tokens_extend", "model.vision", "model.visual")
    text = {key: value for key, value in tensors.items() if not key.startswith(towers)}
    assert spec.parameters == sum(value.numel() for value in text.values())
    ruined = {key: value if key in text else torch.zeros(1, dtype=torch.int8) for key, value in tensors.items()}
    save_file(ruined, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, dtype="float32", device="cpu", max_model_len=64)
    assert model.spec == spec


@pytest.mark.parametrize(
    ("stored", "decoder", "head"),
    [
        ("language_model.model.layers.0.x language_model.model.embed_tokens.weight language_model.lm_head.weight",
         "language_model.model.", "language_model."),
        ("model.language_model.layers.0.x model.language_model.embed_tokens.weight lm_head.weight",
         "model.language_model.", ""),
        ("thinker.model.layers.0.x thinker.model.embed_tokens.weight thinker.lm_head.weight talker.lm_head.weight",
         "thinker.model.", "thinker."),
        ("layers.0.x embed_tokens.weight tower.embed_tokens.weight", "", ""),
        ("model.layers.0.x model.embed_tokens.weight", "model.", ""),
    ],
)  # fmt: skip
def test_names_of_the_text_part(stored: str, decoder: str, head: str) -> None:
    found = find_text_tensors(stored.split(), {"text_config": {}})
    assert (found.decoder, found.head) == (decoder, head)


def test_several_decoders_are_refused_when_names_do_not_tell(tmp_path: Path) -> None:
    names = [f"{part}.layers.0.x" for part in ("a", "b")] + [f"{part}.embed_tokens.weight" for part in ("a", "b")]
    with pytest.raises(ModelError, match=r"several decoders \(a\.embed_tokens\.weight, b\.embed_tokens\.weight\)"):
        find_text_tensors(names, {"text_config": {}})


@pytest.mark.parametrize("model_type", NATIVE_TYPES)
def test_sizes_that_a_nested_configuration_leaves_out_are_those_of_the_library(model_type: str) -> None:
    parsed = parse_native_config({"model_type": "new_vl", "text_config": {"model_type": model_type}})
    library = CONFIG_MAPPING[model_type]()
    for ours, theirs in (("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")):
        assert getattr(parsed, ours) == getattr(library, theirs)
    for field in ("vocab_size", "hidden_size", "intermediate_size"):
        assert getattr(parsed, field) == getattr(library, field)


UNREAD: dict[str, tuple[list[str], list[str]]] = {
    "gemma3": (["vision_tower.x", "multi_modal_projector.x"], ["model.layers.0.x", "language_model.model.layers.0.x"]),
    "qwen2_5_vl": (["visual.blocks.0.x", "model.visual.x", "mtp.x"], ["model.language_model.layers.0.x"]),
    "phi4_multimodal": (["model.embed_tokens_extend.image_embed.x"], ["model.layers.0.x", "lm_head.bias"]),
}


@pytest.mark.parametrize("name", UNREAD)
def test_unread_tensors_are_known_by_their_names(name: str, tmp_path: Path) -> None:
    save_packed(name, tmp_path)
    folder = check_model_folder(tmp_path)
    config, _ = read_transformers_config(folder, 64)
    model = text_class(config)(config)
    unread, text = UNREAD[name]
    assert [stored for stored in (*unread, *text) if is_unread(stored, model, folder)] == unread
