"""The cache of tokenised rows restores parameter sets, columns and spools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.spool import BlobSpool
from batchgen.job.rows.tokenized_cache import _non_default_params
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.columns import Column, Columns

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.none() | st.integers(10, 2**31),
    "min_new_tokens": st.integers(0, 9),
    "temperature": st.floats(0, 1e6) | st.integers(0, 3),
    "top_p": st.floats(0.01, 1.0),
    "top_k": st.integers(-1, 2**31),
    "best_of": st.none() | st.integers(1, 9),
    "repetition_penalty": st.floats(0.1, 2.0),
    "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
    "bad_words": st.lists(st.text(min_size=1) | st.lists(st.integers(0, 9), min_size=1), max_size=3),
    "allowed_token_ids": st.none() | st.lists(st.integers(0, 9), min_size=1),
    "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 9)),
    "stop_regex": st.sampled_from(["a+", ["b", "[ü]"]]),
    "ignore_eos": st.booleans(),
    "return_logprob": st.booleans(),
    "top_logprobs_num": st.integers(0, 5),
    "suffix": st.none() | st.text(),
    "token_ids_logprob": st.lists(st.integers(0, 9)),
    "return_hidden_states": st.booleans()
    | st.fixed_dictionaries({"layers": st.just([0, -1]), "pool": st.sampled_from(["none", "mean"])}),
    "lora_path": st.none() | st.text(min_size=1),
}
CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"json_schema": {"type": "string", "minLength": 1.5}},
    {"regex": "é*"},
    {"choice": ["yes", "no"]},
    {"custom_logit_processor": "push", "custom_params": {"strength": 2}},
]


@given(st.fixed_dictionaries({}, optional=FIELDS), st.sampled_from(CONSTRAINTS))
def test_parameters_round_trip_through_json(fields: dict[str, Any], constraint: dict[str, Any]) -> None:
    params = SamplingParams(**fields, **constraint)
    again = SamplingParams(**json.loads(json.dumps(_non_default_params(params))))
    assert again == params
    assert _non_default_params(SamplingParams()) == {}


class Two(Columns):
    _columns = ("_wide", "small")

    def __init__(self) -> None:
        self._wide, self.small = Column("q"), Column("i")


def test_restored_columns_are_equal_and_can_grow() -> None:
    first, second = Two(), Two()
    for value in (1, -(2**60)):
        first._wide.append(value)
    first.small.append(7)
    columns = first.columns()
    first.small.append(8)
    second.restore_columns(columns)
    assert (list(second._wide), list(second.small)) == ([1, -(2**60)], [7])
    second.small.append(9)
    assert columns["small"].tolist() == [7]
    with pytest.raises(KeyError):
        second.restore_columns({"wide": columns["wide"]})
    for wrong in (columns["wide"], columns["small"].reshape(1, 1), columns["small"].astype(np.uint32)):
        with pytest.raises(ValueError, match="small has dtype"):
            second.restore_columns({"wide": columns["wide"], "small": wrong})


@given(st.lists(st.binary(max_size=5), max_size=8), st.lists(st.binary(max_size=5), max_size=3))
def test_a_kept_spool_is_continued(
    tmp_path_factory: pytest.TempPathFactory, blobs: list[bytes], more: list[bytes]
) -> None:
    path: Path = tmp_path_factory.mktemp("kept") / "blobs"
    first = BlobSpool(path)
    for blob in blobs:
        first.append(blob)
    first.close(keep=True)
    first.close()
    assert path.exists()
    second = BlobSpool(path, first.columns())
    for blob in more:
        second.append(blob)
    assert [second[index] for index in range(len(second))] == blobs + more
    second.close()
    assert not path.exists()
    if sum(map(len, blobs)):
        path.write_bytes(b"")
        with pytest.raises(ValueError, match="unexpected size"):
            BlobSpool(path, first.columns())
