"""`--quantization int8`: results, loss bound, and unsupported cases."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from batchgen import Engine
from batchgen.config.engine_config import EngineConfig
from batchgen.demo import model_path
from batchgen.engine import quantization as module
from batchgen.engine.quantization import QuantizationLoss, choose_numbers, quantize_in_place
from batchgen.errors import UsageError
from batchgen.kernels import layouts
from batchgen.kernels.layouts import int8_refusal
from batchgen.kernels.linear import Linear
from batchgen.models.base import Numbers
from batchgen.models.check import check_model
from batchgen.models.load import checked_spec
from batchgen.models.native.decoder import NativeModel
from tests.e2e.rows import write_lines
from tests.e2e.runner import run
from tests.models.loading import load_model
from tests.models.tiny import save_tiny

INT8 = EngineConfig(quantization="int8")
REASON = int8_refusal(torch.float32, torch.device("cpu"))
here = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TASKS = ["Sort: 3 1 2", "What is 17 + 25?", "Copy: red fox"]


@here
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_loss_compares_distributions(family: str, tmp_path: Path) -> None:
    model = load_model(save_tiny(family, tmp_path), dtype="float32", device="cpu")
    assert isinstance(model, NativeModel)
    spec = model.spec
    loss = quantize_in_place(model, [[1, 2, 3], [], [spec.vocab_size], list(range(5, 200))])
    assert loss.positions == 4 * 48 + 3 + 128
    assert 0 < loss.divergence < 0.01
    assert 0.8 < loss.agreement <= 1
    assert model.spec == spec
    assert quantize_in_place(model, [[1, 2, 3]]).divergence < 1e-3 * loss.divergence  # quantising again changes nothing


@here
def test_full_weights_are_freed_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {id(found) for found in gc.get_objects() if type(found) is Linear}
    model = load_model(save_tiny("llama", tmp_path), dtype="float32", device="cpu", products="fixed")
    assert isinstance(model, NativeModel)
    loaded = [found for found in gc.get_objects() if type(found) is Linear and id(found) not in before]
    products = [found for found in loaded if found.out_features != model.spec.vocab_size]  # without the head
    full = [weakref.ref(product.compiled.packed.data) for product in products]
    count = len(products)
    del loaded, products
    alive: list[int] = []
    in_int8 = Linear.in_int8

    def counted(self: Linear) -> Linear:
        alive.append(sum(data() is not None for data in full))
        return in_int8(self)

    monkeypatch.setattr(Linear, "in_int8", counted)
    quantize_in_place(model, [[1, 2, 3]])
    assert alive == [count - i // 4 * 4 for i in range(count)] + [0]  # the last is the head


@here
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_in_int8(dtype: str) -> None:
    rows = [{"text": text, "temperature": 0, "max_new_tokens": 8} for text in TASKS]
    full = Engine(str(model_path()), dtype=dtype, device="cpu")
    engine = Engine(str(model_path()), dtype=dtype, device="cpu", quantization="int8")
    assert engine.quantization.divergence < 0.005
    assert engine.kernels.endswith(f"; products: compiled int8 ({engine.quantization})")
    ours, theirs = ([c.text for c in e.generate(rows, ordered=True)] for e in (engine, full))
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 2


@here
def test_quantization_is_in_the_footer_and_the_fingerprint(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TASKS])
    common = ["--temperature", "0", "--max-new-tokens", "4", "--device", "cpu"]
    int8 = ["--quantization", "int8"]
    footers = []
    full = ["--quantization", "none"]
    for number, flags in enumerate(([], full, int8, [*int8, "--deterministic"])):
        run(["run", "rows.jsonl", "-o", f"{number}.parquet", *common, *flags], tmp_path)
        footers.append(json.loads(pq.read_schema(tmp_path / f"{number}.parquet").metadata[b"batchgen.run"]))
    assert [footer["quantization"] for footer in footers] == ["none", "none", "int8", "int8"]
    assert "compiled int8 (" in footers[2]["kernels"]
    assert "nats from the full weights' distributions" in footers[2]["kernels"]
    assert footers[0]["fingerprint"] == footers[1]["fingerprint"]  # "auto" computes nothing else
    assert len({footer["fingerprint"] for footer in footers[1:]}) == 3


@here
def test_a_loss_above_the_bound_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": TASKS[0]}])
    flags = ["--quantization", "int8", "--quantization-bound", "1e-9", "--device", "cpu", "--max-new-tokens", "1"]
    said = run(["run", "rows.jsonl", "-o", "out.parquet", *flags], tmp_path, expect=2).stderr
    assert "error: `--quantization int8` changes this model too much: " in said
    assert "but `--quantization-bound` is 1e-09 nats; leave the option out or raise the bound" in said
    broken = QuantizationLoss(float("nan"), 0.0, 9)
    monkeypatch.setattr(module, "quantize_in_place", lambda model, texts: broken)
    with pytest.raises(UsageError, match="nan nats"):
        Engine(str(model_path()), device="cpu", quantization="int8")


def test_unsupported_cases_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check_model(model_path())
    spec = checked_spec(checked, dtype="float32", device="cpu")

    def reason(config: EngineConfig = INT8, **changes: object) -> str:
        with pytest.raises(UsageError) as caught:
            choose_numbers(config, checked, replace(spec, **changes))  # type: ignore[arg-type]
        return str(caught.value)

    assert reason(device=torch.device("cuda")) == (
        "`--quantization int8` is not supported: it runs on CPUs only; leave the option out"
    )
    assert "runs with the transformers library" in reason(implementation="transformers")
    assert "in bfloat16 or float32, not float16" in reason(dtype=torch.float16)
    assert "only uses PyTorch" in reason(EngineConfig(quantization="int8", attention="torch"))
    monkeypatch.setattr(layouts, "methods", lambda dtype: ("widened",))
    monkeypatch.setattr(layouts, "loaded", lambda: True)
    assert "no dot instruction for int8" in reason()
    monkeypatch.setattr(layouts, "methods", lambda dtype: ("int8",))
    assert choose_numbers(INT8, checked, spec) == Numbers("int8", "fixed")
    monkeypatch.setattr(layouts, "loaded", lambda: False)
    monkeypatch.setattr(layouts, "missing", lambda: "no compiler")
    assert "which are not available: no compiler" in reason()


def test_check_rejects_it_before_reading_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": TASKS[0]}])
    flags = ["--quantization", "int8", "--attention", "torch", "--device", "cpu"]
    for command in ("check", "run"):
        refused = run([command, "rows.jsonl", *flags], tmp_path, expect=2).stderr
        assert "`--quantization int8` is not supported: it needs compiled kernels" in refused
