"""Weights in PyTorch's own files: refused unless asked for, then read like safetensors, and never run."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchgen.cli.app import run_command
from batchgen.errors import ModelError
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.library.probe import ProbeAttention
from tests.models.loading import load_model
from tests.models.quantised import CASES, save_quantised
from tests.models.tiny import save_tiny

torch.set_num_threads(1)


def logits(folder: Path, *, pickles: bool = False) -> torch.Tensor:
    model = load_model(folder, dtype="float32", device="cpu", pickles=pickles)
    ids = torch.arange(3, 20)
    return model.logits(model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention())))


def one_file(tensors: dict[str, Any], folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def shards(tensors: dict[str, Any], folder: Path) -> None:
    names = sorted(tensors)
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        torch.save(part, folder / f"pytorch_model-0000{number}-of-00002.bin")


def indexed(tensors: dict[str, Any], folder: Path) -> None:
    shards(tensors, folder)
    places = {name: f"pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, name in enumerate(sorted(tensors))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


def one_storage(tensors: dict[str, Any], folder: Path) -> None:
    """All tensors are views of one storage, and one is a parameter."""
    flat = torch.cat([each.flatten() for each in tensors.values()])
    parts = flat.split([each.numel() for each in tensors.values()])
    views: dict[str, Any] = {name: p.view(each.shape) for (name, each), p in zip(tensors.items(), parts, strict=True)}
    views["model.norm.weight"] = torch.nn.Parameter(views["model.norm.weight"])
    torch.save(views, folder / "pytorch_model.bin")


def pickled(folder: Path, write: Callable[[dict[str, Any], Path], None]) -> Path:
    """The folder with its safetensors replaced."""
    write(load_file(folder / "model.safetensors"), folder)
    (folder / "model.safetensors").unlink()
    return folder


FORMS = [
    *(("llama", {"tie_word_embeddings": True}, write) for write in (one_file, shards, indexed, one_storage)),
    *(("gpt2", {}, write) for write in (one_file, indexed)),
]


@pytest.mark.parametrize(("model_type", "sizes", "write"), FORMS)
def test_a_model_runs_as_from_safetensors(
    model_type: str, sizes: dict[str, Any], write: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    """Natively with a tied head, and through transformers."""
    folder = save_tiny(model_type, tmp_path, **sizes)
    expected = logits(folder)
    pickled(folder, write)
    with pytest.raises(ModelError, match="add --allow-pickle-weights"):
        check_model(folder)
    assert torch.equal(logits(folder, pickles=True), expected)


def test_quantised_tensors(tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES["gptq"], "llama", tmp_path, num_hidden_layers=1)
    pickled(quantised, one_file)
    torch.testing.assert_close(logits(quantised, pickles=True), logits(plain), rtol=0, atol=1e-4)


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_calls_a_function_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mark = save_tiny("llama", tmp_path / "model"), tmp_path / "mark"
    pickled(folder, lambda tensors, where: one_file({**tensors, "x": Hostile(f"touch {mark}")}, where))
    with pytest.raises(ModelError, match=r"would use \w+\.system, which can run code\. Nothing of it was run"):
        check_model(folder, pickles=True)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "x"}\n')
    for command in (["check", str(source)], ["run", str(source), "-o", str(tmp_path / "out.parquet")]):
        assert run_command([*command, "--model", str(folder), "--allow-pickle-weights"]) == 6
        assert "which can run code" in capsys.readouterr().err
    assert not mark.exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-600])


def compressed(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "is damaged, or was saved by a PyTorch before 1.6"),
    "cut": (cut, "is damaged"),
    "text": (lambda file: file.write_text("hello"), "is damaged"),
    "compressed": (compressed, "is compressed"),
    "old": (
        lambda file: torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False),
        "before 1.6",
    ),
    "a tensor": (lambda file: torch.save(torch.ones(2), file), "holds no tensors by name"),
    "numbers": (lambda file: torch.save({"a": 1}, file), "a is not a tensor of a known dtype"),
    "nested": (lambda file: torch.save({"model": {"a": torch.ones(2)}}, file), "model is not a tensor"),
    "complex": (lambda file: torch.save({"a": torch.ones(2, dtype=torch.complex64)}, file), "of a known dtype"),
    "turned": (lambda file: torch.save({"a": torch.ones(2, 3).T}, file), "in another order of its axes"),
    "missing": (lambda file: torch.save({"lm_head.weight": torch.ones(2)}, file), "lacks"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = pickled(save_tiny("llama", tmp_path), one_file)
    spoil, reason = SPOILT[name]
    spoil(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=reason):
        check_model(folder, pickles=True)


def test_a_check_reads_no_data(tmp_path: Path) -> None:
    folder = pickled(save_tiny("llama", tmp_path, hidden_size=512, intermediate_size=2048), one_file)

    def characters_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    check_model(folder, pickles=True)
    before = characters_read()
    check_model(folder, pickles=True)
    size = (folder / "pytorch_model.bin").stat().st_size
    assert characters_read() - before < size // 4 > 1 << 20
