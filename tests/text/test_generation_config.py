from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ModelError
from batchgen.text.generation_config import load_generation_config


def write(folder: Path, name: str = "generation_config.json", **content: Any) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_only_the_sampling_keys_are_defaults(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_p=0.95, top_k=20.0, min_p=None, do_sample=False, repetition_penalty=1.05)
    assert load_generation_config(tmp_path).sampling_defaults() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert type(load_generation_config(tmp_path).sampling_defaults()["top_k"]) is int


def test_a_folder_without_generation_config_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path).sampling_defaults() == {}
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


@pytest.mark.parametrize("content", [{"temperature": "hot"}, {"top_p": 0.0}, {"top_k": 1.5}, {"min_p": True}])
def test_wrong_defaults_name_the_key_and_the_remedy(tmp_path: Path, content: dict[str, Any]) -> None:
    write(tmp_path, **content)
    with pytest.raises(ModelError, match=rf"`{next(iter(content))}`.*--sampling-defaults openai"):
        load_generation_config(tmp_path).sampling_defaults()
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
