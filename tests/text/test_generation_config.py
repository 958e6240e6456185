from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ModelError
from batchgen.text.tokens.model_files import load_generation_config

VOCAB = 100


def write(folder: Path, name: str = "generation_config.json", **content: Any) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_only_the_sampling_keys_are_defaults(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_p=0.95, top_k=20.0, min_p=None, do_sample=False, repetition_penalty=1.05)
    found = load_generation_config(tmp_path).sampling_defaults(VOCAB)
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert type(found["top_k"]) is int


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"suppress_tokens": [3, 99, -1, 100]}, {"suppress_tokens": [3, 99]}),
        ({"begin_suppress_tokens": [100]}, {}),
        ({"bad_words_ids": [[3], [4, 5], [2], [2, 4], [100, 3]]}, {"bad_words": [[3], [4, 5], [2, 4]]}),
    ],
)
def test_ids_that_have_no_effect_are_left_out(
    tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Ids past the vocabulary; and the end of sequence among bad words, as transformers does."""
    assert load_generation_config(write(tmp_path, eos_token_id=2, **content)).sampling_defaults(VOCAB) == expected


def test_what_is_not_applied_is_named_in_one_line(tmp_path: Path) -> None:
    neutral = {
        "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1, "do_sample": True, "stop_strings": None,
        "sequence_bias": {}, "max_length": 4096, "top_k": 5, "repetition_penalty": 1.1, "use_cache": True,
    }  # fmt: skip
    assert load_generation_config(write(tmp_path, **neutral)).note is None
    asked = {
        "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2,
        "forced_bos_token_id": 0, "forced_eos_token_id": [2], "exponential_decay_length_penalty": [9, 1.1],
        "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3, "do_sample": False, "num_beams": 4,
        "max_new_tokens": 512, "min_length": 5, "stop_strings": ["END"], "sequence_bias": [[[5], -9.0]],
    }  # fmt: skip
    note = load_generation_config(write(tmp_path, **asked)).note
    assert note is not None
    assert "\n" not in note
    assert [name for name in asked if f"`{name}` {json.dumps(asked[name])}" not in note] == []


def test_a_folder_without_generation_config_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path).sampling_defaults(VOCAB) == {}
    assert load_generation_config(tmp_path).note is None
    assert load_generation_config(tmp_path).eos_ids == frozenset()


@pytest.mark.parametrize(("eos", "ids"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_eos_ids(tmp_path: Path, eos: Any, ids: set[int]) -> None:
    assert load_generation_config(write(tmp_path, eos_token_id=eos)).eos_ids == ids


def test_eos_ids_fall_back_to_config_json(tmp_path: Path) -> None:
    write(tmp_path, "config.json", eos_token_id=5)
    assert load_generation_config(tmp_path).eos_ids == {5}
    write(tmp_path, "config.json", text_config={"eos_token_id": [6]})
    assert load_generation_config(tmp_path).eos_ids == {6}
    write(tmp_path, eos_token_id=[8])
    assert load_generation_config(tmp_path).eos_ids == {8}


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": "hot"}, {"top_p": 0.0}, {"top_k": 1.5}, {"min_p": True}, {"repetition_penalty": 0},
        {"suppress_tokens": 3}, {"begin_suppress_tokens": ["a"]}, {"bad_words_ids": [[]]}, {"bad_words_ids": [3]},
    ],
)  # fmt: skip
def test_wrong_defaults_name_the_key_and_the_remedy(tmp_path: Path, content: dict[str, Any]) -> None:
    write(tmp_path, **content)
    with pytest.raises(ModelError, match=rf"`{next(iter(content))}`.*--sampling-defaults openai"):
        load_generation_config(tmp_path).sampling_defaults(VOCAB)
    load_generation_config(tmp_path)  # what `--sampling-defaults openai` reads


@pytest.mark.parametrize("content", ["{ half", "[1]"])
def test_damaged_files_are_model_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_generation_config(tmp_path)


@pytest.mark.parametrize("eos", ["</s>", [True], -1, {"id": 1}])
def test_eos_that_is_not_a_token_id_is_refused(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        load_generation_config(write(tmp_path, eos_token_id=eos))
