"""Parts of stored tensors, in every form that a checkpoint stores, equal the parts of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from batchgen.models.check import check_model
from batchgen.models.checkpoint.quantized_tensors import StoredTensor
from batchgen.models.checkpoint.safetensors_header import read_header
from batchgen.models.checkpoint.weights import WeightReader
from tests.models.gguf_files import as_kind, write_tiny
from tests.models.quantised import CASES, save_quantised


def assert_parts(tensors: Mapping[str, StoredTensor], dtype: torch.dtype = torch.float32) -> None:
    random = Random(0)
    with WeightReader(tensors) as reader:
        for name, stored in tensors.items():
            whole = reader.read(name, dtype)
            for _ in range(4):
                ends = [sorted(random.sample(range(size + 1), 2)) for size in stored.shape]
                index = tuple(slice(*each) for each in ends)[: random.randint(0, len(ends))]
                assert torch.equal(reader.read(name, dtype, index), whole[index]), (name, index)


@pytest.mark.parametrize("name", CASES)
def test_of_quantised_matrices(name: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    assert_parts(check_model(quantised).folder.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_plain_tensors(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.models.checkpoint.weights._BUFFER_BYTES", 64)  # many pieces
    shapes = [(9,), (13, 7), (3, 5, 8), (2, 3, 4, 5), (1, 1)]
    save_file({str(shape): torch.randn(shape) for shape in shapes}, tmp_path / "x.safetensors")
    assert_parts(read_header(tmp_path / "x.safetensors")[0], dtype)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.F16])
def test_of_a_gguf_file(kind: Kind, tmp_path: Path) -> None:
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    path = write_tiny(tmp_path / "model.gguf", "llama", config=config, choose=as_kind(kind))
    assert_parts(check_model(path).folder.tensors)


def test_no_other_bytes_of_a_plain_matrix_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.randn(512, 4096)}, tmp_path / "x.safetensors")
    tensors, _ = read_header(tmp_path / "x.safetensors")

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    for index in ((slice(128, 384),), (slice(0, 512), slice(1024, 2048))):
        with WeightReader(tensors) as reader:
            before = bytes_read()
            part = reader.read("x", torch.float32, index)
            assert part.nbytes <= bytes_read() - before < part.nbytes + 4096
