"""Checkpoints in integers, computed in these, against what their formats mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from batchgen.config.engine_config import EngineConfig
from batchgen.engine import quantization
from batchgen.engine.quantization import choose_numbers, quantize_in_place
from batchgen.kernels.layouts import int8_refusal
from batchgen.kernels.stream import plan_stream
from batchgen.models.base import Form, ModelInput, Numbers
from batchgen.models.check import check_model
from batchgen.models.checkpoint.weights import WeightReader
from batchgen.models.library.probe import ProbeAttention
from batchgen.models.load import DtypeName, checked_spec, load_checked
from batchgen.models.native.decoder import NativeModel
from batchgen.models.native.own_integers import OwnIntegers, stream_bytes
from tests.engine.fake_device import LateDevice
from tests.models.loading import load_model
from tests.models.quantised import CASES, W8A8, Case, by_groups, save_quantised

torch.set_num_threads(1)
REASON = int8_refusal(torch.float32, torch.device("cpu"))
here = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
"""Groups of 32 and 64 divide these, groups of 128 do not."""


def hidden(model: NativeModel) -> Tensor:
    ids = torch.arange(3, 40)
    return model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention())).float()


def loaded(folder: Path, dtype: DtypeName = "float32", form: Form = "full") -> NativeModel:
    model = load_model(folder, dtype=dtype, device="cpu", form=form, products="fixed")
    assert isinstance(model, NativeModel)
    return model


def by_token(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product as W8A8 means it: inputs in int8 with one scale for each token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return F.linear((x / scale).round() * scale, weight, bias)


@here
@pytest.mark.parametrize("name", W8A8)
def test_integers_are_computed_as_the_format_says(name: str, tmp_path: Path) -> None:
    """The error against the dequantised checkpoint is at most that of rounding inputs as the format does."""
    quantised, plain = save_quantised(W8A8[name], "llama", tmp_path, **SIZES)
    model, exact = (
        loaded(quantised, form="integers"),
        load_model(plain, dtype="float32", device="cpu", products="torch"),
    )
    assert isinstance(exact, NativeModel)
    assert model.stored_products == 8
    expected = hidden(exact)
    bound = (hidden(exact.with_product(by_token)) - expected).norm()
    assert 0 < (hidden(model) - expected).norm() <= bound
    in_half = hidden(loaded(quantised, "bfloat16", "integers"))
    rounding = (hidden(loaded(plain, "bfloat16")) - expected).norm()
    assert (in_half - expected).norm() <= bound + 2 * rounding


PAST_INT8 = ("gptq 8 bits", "compressed int8 with zeros", "torchao int8 with zeros")
"""Formats whose integers need nine bits once their zeros are taken from them."""
FITTING = {
    name: case
    for name, case in CASES.items()
    if case.label.startswith("int") and "act-order" not in name and name not in PAST_INT8
}
OTHERS = {name: CASES[name] for name in ("fp8 blocks", "gptq act-order", "bitsandbytes nf4", *PAST_INT8)}


@here
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, name in enumerate(FITTING)]
)
def test_int8_takes_the_integers_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(FITTING[name], "llama", tmp_path, **SIZES)
    own, again = loaded(quantised), loaded(plain)
    lost, expected = quantize_in_place(own, [[1, 2, 3]]), quantize_in_place(again, [[1, 2, 3]])
    assert (own.stored_products, again.stored_products) == (8, 0)
    assert lost.divergence < expected.divergence


@here
@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_are_quantised_again(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(OTHERS[name], "llama", tmp_path, **SIZES)
    models = [loaded(quantised), loaded(plain)]
    for model in models:
        quantize_in_place(model, [])
    assert models[0].stored_products == 0
    torch.testing.assert_close(*map(hidden, models), rtol=0, atol=1e-4)


WEIGHT_CASES = {
    "fp8 tensor": 8, "fp8 channel": 8, "fp8 blocks, undescribed size": 8, "gptq": 8, "awq": 8, "compressed int8": 8,
    "compressed int3 per channel": 8, "torchao int8 groups": 8, "bitsandbytes int8": 8, "fp8 blocks": 0,
    "fp8 e5m2": 0, "gptq act-order": 0, "gptq 8 bits": 0, "nvfp4": 0,
}  # fmt: skip
"""Format -> linear layers that are computed from their own numbers; 0: they are dequantised."""


@pytest.mark.parametrize("name", WEIGHT_CASES)
def test_stored_weights_mean_the_dequantised_ones(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES[name], "llama", tmp_path, **SIZES)
    checked = check_model(quantised)
    assert checked.native is not None
    own, layout = OwnIntegers(checked.folder, checked.native[1]), checked.native[1]
    expected, count = load_file(plain / "model.safetensors"), 0
    with WeightReader(checked.folder.tensors) as reader:
        for layer in layout.layers:
            for fused in (layer[each] for each in ("qkv", "o", "gate_up", "down")):
                weight = own.read_weight(fused, reader)
                if weight is not None:
                    count += 1
                    whole = torch.cat([expected[part] for part, _ in fused.parts])
                    torch.testing.assert_close(weight.dense(), whole, rtol=1e-6, atol=1e-7)
    assert count == WEIGHT_CASES[name]


@pytest.mark.parametrize("name", ["gptq", "fp8 tensor", pytest.param("awq", marks=pytest.mark.slow)])
def test_products_of_stored_weights_are_those_of_dequantised_ones(name: str, tmp_path: Path) -> None:
    """In Triton's interpreter."""
    quantised, plain = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    model, exact = loaded(quantised, form="weight-only"), hidden(loaded(plain))
    assert model.stored_products == 4
    torch.testing.assert_close(hidden(model), exact, rtol=0, atol=1e-4)
    in_half = hidden(loaded(quantised, "bfloat16", "weight-only"))
    assert (in_half - exact).norm() <= 1.5 * (hidden(loaded(plain, "bfloat16")) - exact).norm()


@pytest.mark.parametrize("name", ["gptq", "fp8 tensor"])
def test_stored_weights_are_streamed_as_they_are(name: str, tmp_path: Path) -> None:
    """Numbers, scales and zeros of blocks that are copied to a device before they compute."""
    quantised, _ = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=2, attention_bias=True)
    checked = check_model(quantised)
    assert checked.native is not None
    sizes = stream_bytes(checked.native[1], 4, checked.folder)
    plan = plan_stream(sizes, 0, sizes[0])
    spec = replace(checked_spec(checked, dtype="float32", device="cpu"), numbers=Numbers("weight-only"), stream=plan)
    model = load_checked(checked, spec)
    assert isinstance(model, NativeModel)
    assert model.stream is not None
    assert model.stored_products == 8
    model.stream.device = LateDevice()
    assert torch.equal(hidden(model), hidden(loaded(quantised, form="weight-only")))
    assert model.stream.counts()["offload_weight_bytes"] == sum(sizes)


WEIGHT_ONLY = Case(W8A8["per token"].pack, by_groups("int-quantized", num_bits=8, type="int"), "int8 per channel")

MISLABELLED = Case(CASES["fp8 channel"].pack, W8A8["per token"].config, "FP8 per channel")
"""Floats whose description speaks of integers."""


@here
@pytest.mark.parametrize(
    ("case", "options", "form"),
    [
        (W8A8["per token"], {}, "integers"),
        (W8A8["torchao"], {}, "integers"),
        (W8A8["per token"], {"quantization": "none"}, "full"),
        (W8A8["per token"], {"quantization": "int8"}, "int8"),
        (W8A8["per token"], {"attention": "torch"}, "full"),
        (W8A8["per token"], {"model_impl": "transformers"}, "full"),
        (WEIGHT_ONLY, {}, "full"),
        (MISLABELLED, {}, "full"),
        (CASES["gptq 8 bits"], {}, "full"),
    ],
)
def test_auto_keeps_integers_that_are_made_for_integer_inputs(
    case: Case, options: dict[str, str], form: Form, tmp_path: Path
) -> None:
    quantised, _ = save_quantised(case, "llama", tmp_path, **SIZES)
    config = EngineConfig(model=str(quantised), deterministic=True, **options)  # type: ignore[arg-type]
    checked = check_model(quantised, implementation=config.model_impl)
    assert choose_numbers(config, checked, checked_spec(checked, dtype="float32", device="cpu")).form == form


@pytest.mark.parametrize(
    ("options", "free", "pays", "form"),
    [
        ({}, 1 << 40, True, "weight-only"),
        ({}, 1 << 40, False, "full"),
        ({}, 1 << 16, False, "weight-only"),  # dequantised weights would not fit
        ({"deterministic": True}, 1 << 16, True, "full"),
        ({"quantization": "none"}, 1 << 16, True, "full"),
    ],
)
def test_auto_on_a_gpu(
    options: dict[str, Any], free: int, pays: bool, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = save_quantised(CASES["gptq"], "llama", tmp_path, **SIZES)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(quantization, "grouped_weights_pay", lambda sizes, steps, step: pays)
    checked = check_model(quantised)
    spec = checked_spec(checked, dtype="bfloat16", device="cuda", elsewhere=True)
    assert choose_numbers(EngineConfig(model=str(quantised), **options), checked, spec).form == form
