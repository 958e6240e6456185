"""`batchgen models` says of each type of the library what loading a checkpoint says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from batchgen.errors import ModelError
from batchgen.models.architectures import causal_lm_types, packed_types
from batchgen.models.library.model_types import missing, model_types
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.models.loading import inspect_model
from tests.models.test_packed_types import RUN
from tests.models.tiny import HYBRID_TYPES, MORE_TYPES, SPARSE_TYPES, TYPES, tiny_config
from tests.models.tiny_packed import packed_config

torch.set_num_threads(1)

ALIASES = {"gpt-sw3"}
"""Names of a type that has another one."""
BY_SETTING: dict[str, dict[str, Any]] = {
    "hrm_text": {"prefix_lm": True},
}
"""Types that run, but not with these values, which they have by default."""
UNLIKE = {"florence2", "inkling_mm_model"}
"""Types whose small configuration is not that of an encoder-decoder, or whose class needs another package."""


def save_config(name: str, folder: Path) -> None:
    """A folder with a small configuration of a type, or its name alone, and no weights."""
    packed = name in packed_types() and name not in causal_lm_types()
    try:
        config = packed_config(CONFIG_MAPPING[name]) if packed else tiny_config(name, **BY_SETTING.get(name, {}))
        values = config.to_dict()
    except Exception:  # of the library, for values that do not fit
        values = {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**values, "model_type": name}, default=str))
    save_file({"v_head.weight": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.slow
def test_the_table_is_that_of_loading(tmp_path: Path) -> None:
    """The types that run are those that tests compare with the library; the others are refused for the same reason."""
    rows = {name: (runs != "no", what) for name, runs, _, what in model_types("")}
    compared = {*TYPES, *MORE_TYPES, *SPARSE_TYPES, *HYBRIDS, *HYBRID_TYPES, *RUN}
    assert {name for name, (runs, _) in rows.items() if runs} - ALIASES == compared - set(BY_SETTING)
    wrong = {}
    for name, (runs, what) in rows.items():
        if runs or name in UNLIKE:
            continue
        save_config(name, tmp_path / name)
        try:
            length = None if name == "xlnet" else 64  # its configuration says -1
            inspect_model(tmp_path / name, dtype="float32", device="cpu", max_model_len=length)
            reason = "runs"
        except ModelError as error:
            reason = missing(name, error)
        if re.sub(r"\d+", "0", reason) != re.sub(r"\d+", "0", what):
            wrong[name] = reason, what
    assert not wrong
