"""Checkpoints in integers, computed in these, against what their formats mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.quantization import computed_weights
from batchgen.kernels.layouts import int8_refusal
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.load import checked_spec, load_checked, load_model
from batchgen.models.native import NativeModel
from batchgen.models.probe import ProbeAttention
from batchgen.models.quantize import quantise
from tests.models.quantised import CASES, W8A8, Case, by_groups, save_quantised

torch.set_num_threads(1)
REASON = int8_refusal(torch.float32, torch.device("cpu"))
here = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
"""Groups of 32 and 64 divide these, groups of 128 do not."""


def hidden(model: NativeModel) -> Tensor:
    ids = torch.arange(3, 60)
    return model.hidden(ModelInput(ids, torch.arange(len(ids)), ProbeAttention())).float()


def loaded(folder: Path, dtype: str = "float32", *, stored: bool = False) -> NativeModel:
    model = load_checked(check_model(folder), dtype=dtype, device="cpu", products="fixed", stored=stored)  # type: ignore[arg-type]
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
    model, exact = loaded(quantised, stored=True), load_model(plain, dtype="float32", device="cpu", products="torch")
    assert isinstance(exact, NativeModel)
    assert model.stored_products == 8
    expected = hidden(exact)
    bound = (hidden(exact.with_product(by_token)) - expected).norm()
    assert 0 < (hidden(model) - expected).norm() <= bound
    in_half = hidden(loaded(quantised, "bfloat16", stored=True))
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
@pytest.mark.parametrize("name", FITTING)
def test_int8_takes_the_integers_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(FITTING[name], "llama", tmp_path, **SIZES)
    own, again = loaded(quantised), loaded(plain)
    lost, expected = quantise(own, [[1, 2, 3]]), quantise(again, [[1, 2, 3]])
    assert (own.stored_products, again.stored_products) == (8, 0)
    assert lost.divergence < expected.divergence


@here
@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_are_quantised_again(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(OTHERS[name], "llama", tmp_path, **SIZES)
    models = [loaded(quantised), loaded(plain)]
    for model in models:
        quantise(model, [])
    assert models[0].stored_products == 0
    torch.testing.assert_close(*map(hidden, models), rtol=0, atol=1e-4)


WEIGHT_ONLY = Case(W8A8["per token"].pack, by_groups("int-quantized", num_bits=8, type="int"), "int8 per channel")


@here
@pytest.mark.parametrize(
    ("case", "options", "weights"),
    [
        (W8A8["per token"], {}, "stored"),
        (W8A8["torchao"], {}, "stored"),
        (W8A8["per token"], {"quantization": "none"}, "none"),
        (W8A8["per token"], {"quantization": "int8"}, "int8"),
        (W8A8["per token"], {"attention": "torch"}, "none"),
        (W8A8["per token"], {"model_impl": "transformers"}, "none"),
        (WEIGHT_ONLY, {}, "none"),
        (CASES["gptq 8 bits"], {}, "none"),
    ],
)
def test_auto_keeps_integers_that_are_made_for_integer_inputs(
    case: Case, options: dict[str, str], weights: str, tmp_path: Path
) -> None:
    quantised, _ = save_quantised(case, "llama", tmp_path, **SIZES)
    config = EngineConfig(model=str(quantised), deterministic=True, **options)  # type: ignore[arg-type]
    checked = check_model(quantised, implementation=config.model_impl)
    assert computed_weights(config, checked, checked_spec(checked, dtype="float32", device="cpu")) == weights
