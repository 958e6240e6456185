"""Images and audio through a model's own processor: what they become by size, and the tensors of each item."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.models.checkpoint.folder import check_model_folder
from batchgen.models.library.media_config import with_sounds
from batchgen.models.media.encoder import load_media_encoder, tower_bytes
from batchgen.models.media.processor import ItemRefused, MediaProcessor, find_media_processor
from tests.models.media_steps import Item, Loaded, library_inputs, load
from tests.models.quantised import CASES, quantise_folder
from tests.models.tiny import save_tiny
from tests.models.tiny_media import byte_tokenizer, save_media
from tests.models.tiny_packed import save_packed

torch.set_num_threads(1)

PICTURES = [Item("image", (60, 40), 1), Item("image", (33, 90), 2), Item("image", (60, 40), 3)]
SOUNDS = [Item("audio", (7000,), 1), Item("audio", (4000,), 2)]


def loaded_of(name: str, folder: Path) -> Loaded:
    return load(folder, save_media(name, folder)[1])


def split(name: str, whole: Tensor, items: list[Tensor]) -> list[Tensor]:
    """A tensor of a whole prompt, cut into those of its items."""
    if name in ("pixel_values", "image_sizes") and whole.shape[0] == 1:  # of the prompt's images, padded
        whole = whole[0]
        return [row[None, None, ...] for row in whole]
    return list(whole.split([len(item) for item in items]))


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl",
        "llava_next",
        "internvl",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "gemma4", "glm4v")),
    ],
)
def test_an_item_has_the_bits_that_it_has_in_the_whole_prompt(name: str, tmp_path: Path) -> None:
    loaded = loaded_of(name, tmp_path)
    whole = library_inputs(loaded, ["a", *PICTURES])
    made = [loaded.processor.prepare(item, item.decoded).tensors for item in PICTURES]
    assert made[0].keys() == whole.keys() - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    for key in made[0]:
        parts = split(key, whole[key], [item[key] for item in made])
        for ours, theirs in zip((item[key] for item in made), parts, strict=True):
            # Tiles of several images are padded to as many as the largest has.
            assert torch.equal(ours, theirs[:, : ours.shape[1]] if ours.dim() == 5 else theirs)


def test_sounds_have_the_bits_that_they_have_in_the_whole_prompt(tmp_path: Path) -> None:
    loaded = loaded_of("qwen2_audio", tmp_path)
    whole = library_inputs(loaded, ["a", *SOUNDS])
    assert loaded.processor.audio_rate == 16000
    for row, item in enumerate(SOUNDS):
        made = loaded.processor.prepare(item, item.decoded).tensors
        assert all(torch.equal(value, whole[key][row : row + 1]) for key, value in made.items())


def test_expansions_follow_from_sizes_alone(tmp_path: Path) -> None:
    processor = loaded_of("qwen2_vl", tmp_path).processor
    first, second, third = processor.expand(PICTURES)
    assert first is third
    assert (first.text, first.features) == ("<|image_pad|>" * 2, 2)
    assert (second.text, second.features) == ("<|image_pad|>" * 3, 3)
    assert {name: values.tolist() for name, values in second.layout.items()} == {"image_grid_thw": [[1, 6, 2]]}
    assert (processor.kinds, processor.placeholder("image"), processor.audio_rate) == ({"image"}, "<|image_pad|>", 0)


def test_images_that_are_treated_as_several_have_other_features(tmp_path: Path) -> None:
    """LLaVA-OneVision cuts a single image into tiles, and several ones not."""
    loaded = loaded_of("llava_onevision", tmp_path)
    alone, among = loaded.processor.expand(PICTURES[:1])[0], loaded.processor.expand(PICTURES[:2])[0]
    assert (alone.grouped, among.grouped) == (False, True)
    assert alone.features > among.features
    item = PICTURES[0]
    made = [loaded.processor.prepare(item, item.decoded, grouped=grouped) for grouped in (False, True)]
    features = [loaded.encoder.encode([one])[0] for one in made]
    assert [len(rows) for rows in features] == [alone.features, among.features]


def test_threads_prepare_items_at_once(tmp_path: Path) -> None:
    processor = loaded_of("qwen2_vl", tmp_path).processor
    items = [Item("image", (20 + 9 * number % 70, 30 + 7 * number % 50), number) for number in range(24)]
    expected = [processor.prepare(item, item.decoded) for item in items]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda item: processor.prepare(item, item.decoded), items))
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.features, ours.shape) == (theirs.features, theirs.shape)
        assert all(torch.equal(value, theirs.tensors[key]) for key, value in ours.tensors.items())


def test_items_of_one_shape_are_encoded_together(tmp_path: Path) -> None:
    loaded = loaded_of("qwen3_vl", tmp_path)
    items = [loaded.processor.prepare(item, item.decoded) for item in (PICTURES[0], PICTURES[2])]
    assert items[0].shape == items[1].shape
    together = loaded.encoder.encode(items)
    assert {rows.shape for rows in together} == {(items[0].features, loaded.model.spec.features_size)}
    for rows, item in zip(together, items, strict=True):
        torch.testing.assert_close(rows, loaded.encoder.encode([item])[0], atol=1e-5, rtol=0)
    assert not torch.equal(*together)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_towers_run_in_the_number_format_of_the_run(name: str, tmp_path: Path) -> None:
    loaded = loaded_of(name, tmp_path)
    item = loaded.processor.prepare(PICTURES[0], PICTURES[0].decoded)
    (exact,) = loaded.encoder.encode([item])
    spec = replace(loaded.model.spec, dtype=torch.bfloat16)
    (rounded,) = load_media_encoder(check_model_folder(tmp_path), spec).encode([item])
    assert rounded.dtype == torch.bfloat16
    assert 0 < (rounded.float() - exact).norm() < 0.05 * exact.norm()


def test_a_size_that_the_processor_refuses_is_an_error_of_the_row(tmp_path: Path) -> None:
    processor = loaded_of("qwen2_vl", tmp_path).processor
    message = r"cannot be taken by the model's processor \(.*aspect ratio.*\); give another image"
    with pytest.raises(ItemRefused, match=message) as refused:
        processor.expand([PICTURES[0], Item("image", (4000, 2))])
    assert refused.value.index == 1


def test_models_without_media_say_why(tmp_path: Path) -> None:
    cases = {
        "llama": "llama models read text alone",
        "chameleon": "codebook",
        "gemma3": "processor cannot be used",  # the folder has none
    }
    for name, reason in cases.items():
        folder = tmp_path / name
        (save_tiny if name == "llama" else save_packed)(name, folder)
        found = find_media_processor(check_model_folder(folder))
        assert isinstance(found, str)
        assert reason in found


def test_a_processor_that_changes_the_text_around_images_is_refused(tmp_path: Path) -> None:
    """Idefics 2 joins neighbouring images, so that an image does not become the same tokens everywhere."""
    save_media("idefics2", tmp_path)
    found = find_media_processor(check_model_folder(tmp_path))
    assert isinstance(found, str)
    assert "changes the text around images" in found


def test_unknown_classes_and_lost_towers_are_named(tmp_path: Path) -> None:
    _, library = save_media("llava", tmp_path)
    spec = load(tmp_path, library).model.spec
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"weights of the towers .*missing_keys: model\.vision_tower"):
        load_media_encoder(check_model_folder(tmp_path), spec)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "internvl_chat"}))
    assert "has no class for internvl_chat" in str(find_media_processor(check_model_folder(tmp_path)))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_audio", "gemma3"])
def test_only_the_towers_are_read(tmp_path: Path, family: str) -> None:
    _, library = save_media(family, tmp_path)
    loaded = load(tmp_path, library)
    assert isinstance(loaded.processor, MediaProcessor)
    towers = 4 * sum(
        tensor.numel()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if not re.search(r"language_model|lm_head|^model\.(layers|embed_tokens|norm)\.", name)
    )
    assert loaded.encoder.nbytes == towers
    assert tower_bytes(check_model_folder(tmp_path), loaded.model.spec) == towers


def test_quantised_towers_are_dequantised(tmp_path: Path) -> None:
    _, library = save_media("llava", tmp_path / "plain")
    folder = quantise_folder(CASES["fp8 blocks"], tmp_path / "quantised", tmp_path / "plain")
    loaded = load(tmp_path / "plain", library)  # with what the quantised values mean
    item = loaded.processor.prepare(PICTURES[0], PICTURES[0].decoded)
    (expected,) = loaded.encoder.encode([item])
    checked = check_model_folder(folder)
    assert checked.quantisation is not None
    (got,) = load_media_encoder(checked, loaded.model.spec).encode([item])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def save_phi4(folder: Path) -> None:
    """A checkpoint whose processor of images needs torchvision, and that of sounds does not."""
    save_packed("phi4_multimodal", folder)
    names = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    byte_tokenizer(["<pad>", *names.values()], names).save_pretrained(folder)
    parts = {"image_processor_type": "Phi4MultimodalImageProcessor"}
    parts |= {"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "processor_class": "Phi4MultimodalProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(parts))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the processor of images can be read")
def test_a_kind_whose_processor_lacks_a_package_is_left_out(tmp_path: Path) -> None:
    save_phi4(tmp_path)
    processor = find_media_processor(check_model_folder(tmp_path))
    assert isinstance(processor, MediaProcessor)
    assert (processor.kinds, processor.audio_rate) == ({"audio"}, 16000)
    with pytest.raises(ItemRefused, match="encodes audio otherwise next to them; give images or audio") as refused:
        processor.expand([PICTURES[0], SOUNDS[0]])
    assert refused.value.index == 1


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a class of another kind": ({"processor_class": "AutoModel"}, "cannot be used"),
    "an unknown class": ({"processor_class": "os"}, "has no attribute os"),
    "code in the folder": (
        {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}},
        "custom code",
    ),
    "a wrong value": ({"image_processor_type": "CLIPImageProcessor", "size": "big"}, "big"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_files_of_a_processor_are_a_reason_and_run_nothing(name: str, tmp_path: Path) -> None:
    save_packed("llava", tmp_path)
    byte_tokenizer(["<pad>", "<image>"], {}).save_pretrained(tmp_path)
    values, reason = HOSTILE[name]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"} | values))
    found = find_media_processor(check_model_folder(tmp_path))
    assert isinstance(found, str)
    assert reason in found
    assert not (tmp_path / "ran").exists()


def test_sounds_of_voxtral_are_whole_chunks_of_30_seconds() -> None:
    """As mistral-common pads and counts them; the spectrograms are the library's."""
    tokenizer = byte_tokenizer(["<pad>", "[AUDIO]", "[BEGIN_AUDIO]"], {})
    made = with_sounds(transformers.VoxtralProcessor)(transformers.WhisperFeatureExtractor(128), tokenizer)
    processor = MediaProcessor(made, transformers.VoxtralConfig(audio_token_id=257))
    for samples, chunks in ((1, 1), (16000, 1), (480000, 1), (480001, 2), (960001, 3)):
        item = Item("audio", (samples,))
        (found,) = processor.expand([item])
        assert (found.text, found.features) == ("[BEGIN_AUDIO]" + "[AUDIO]" * 375 * chunks, 375 * chunks)
        features = processor.prepare(item, item.decoded).tensors["input_features"]
        padded = np.pad(item.decoded, (0, 480000 * chunks - samples))
        whole = made.feature_extractor(padded, sampling_rate=16000, truncation=False, return_tensors="pt")
        assert torch.equal(features, torch.cat(whole["input_features"][0].split(3000, -1)).view(chunks, 128, 3000))
