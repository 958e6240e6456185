"""Quantised checkpoints run as their plain twins do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchgen.errors import ModelError
from batchgen.models.base import ModelInput
from batchgen.models.check import check_model
from batchgen.models.library.probe import ProbeAttention
from tests.engine.test_hybrid import TYPES as HYBRIDS
from tests.models.loading import load_model
from tests.models.quantised import CASES, Case, by_groups, described, gptq, mxfp4, save_quantised, write_stored
from tests.models.test_load import write_large
from tests.models.tiny import save_tiny

torch.set_num_threads(1)


def labels(folder: Path) -> dict[str, int]:
    """Encodings that are found in a folder, with the number of their tensors."""
    plain = check_model(folder).folder.plain
    assert plain is not None
    return dict(plain.labels)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = load_model(folder, device="cpu", **{"dtype": "float32", **options})
    ids, probe = torch.arange(3, 27), ProbeAttention()
    states = probe.states.on(ids.device, len(ids))
    return model.logits(model.hidden(ModelInput(ids, torch.arange(len(ids)), probe, states=states))).float()


def assert_same(quantised: Path, plain: Path, **options: Any) -> None:
    got, expected = logits(quantised, **options), logits(plain, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_checkpoint_equals_its_plain_twin(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES[name], "llama", tmp_path, num_hidden_layers=1)
    assert labels(quantised) == {CASES[name].label: 7}
    assert_same(quantised, plain, implementation="native")


@pytest.mark.parametrize(
    ("version", "bits", "settings"),
    [
        (2, 2, {"sym": True, "checkpoint_format": "gptq"}),
        (1, 3, {"sym": True, "checkpoint_format": "gptq_v2"}),
        (1, 4, {"sym": True}),
        (2, 4, {"sym": True}),
        (1, 4, {"checkpoint_format": "gptq_v2"}),
        (2, 8, {"sym": True, "dynamic": {"-:lm_head": {}}}),
        (1, 8, {"sym": False, "dynamic": {"+:.*_proj": {"sym": True}}}),
    ],
)
def test_symmetric_zeros_show_the_version_of_gptq(
    version: int, bits: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever the description calls it."""
    case = Case(gptq(bits, 32, version=version, symmetric=True), described("gptq", bits=bits, **settings), "")
    assert_same(*save_quantised(case, "llama", tmp_path, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("case", "zeros", "value"),
    [
        (Case(gptq(4, 32, symmetric=True), described("gptq", bits=4, sym=True), ""), "qzeros", 0x77777777),
        (
            Case(CASES["compressed int4 with zeros"].pack, by_groups("pack-quantized", num_bits=4, symmetric=True), ""),
            "weight_zero_point",
            -0x77777778,
        ),
    ],
    ids=["gptq", "compressed-tensors"],
)
def test_symmetric_zeros_are_checked_in_every_row(case: Case, zeros: str, value: int, tmp_path: Path) -> None:
    quantised, _ = save_quantised(case, "llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(quantised / "model.safetensors")
    for name in [name for name in tensors if name.endswith(zeros)]:
        tensors[name].fill_(value)
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    load_model(quantised, device="cpu", dtype="float32")
    tensors[f"{FIRST}.{zeros}"][-1, -1] += 1
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.safetensors holds zero points that the symmetric codes .* do not"):
        load_model(quantised, device="cpu", dtype="float32")


def test_zero_points_of_floats_count_where_they_are_stored(tmp_path: Path) -> None:
    """Quantisers write zeros there; any other number moves the values."""

    def moved(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, plain = CASES["compressed fp8"].pack(weight)
        zero = torch.full_like(stored["weight_scale"], 2).to(torch.float8_e4m3fn)
        return {**stored, "weight_zero_point": zero}, plain - 2 * stored["weight_scale"].float()

    case = Case(moved, CASES["compressed fp8"].config, "FP8 per channel")
    assert_same(*save_quantised(case, "llama", tmp_path, num_hidden_layers=1))


SAMPLED = ("fp8 blocks", "gptq zero biases")
"""Formats that run through the library in every test run; all of them are read by the same reader."""
EACH = [pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", EACH)
def test_the_library_gets_the_plain_tensors(name: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES[name], "qwen3", tmp_path, num_hidden_layers=1)
    assert_same(quantised, plain, implementation="transformers")


SLOW_EXPERTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "deepseek_v3")]


@pytest.mark.parametrize("model_type", ["qwen3_moe", *SLOW_EXPERTS])
def test_experts_are_stacked_from_quantised_ones(model_type: str, tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES["fp8 blocks"], model_type, tmp_path)
    assert sum(labels(quantised).values()) > 30
    assert_same(quantised, plain)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3_next", "awq"), ("lfm2", "nvfp4"), ("nemotron_h", "gptq zero biases"), ("mamba", "compressed int4")],
)
def test_projections_of_recurrent_layers(model_type: str, name: str, tmp_path: Path) -> None:
    """Convolutions and parameters of states stay as they are stored."""
    quantised, plain = save_quantised(CASES[name], model_type, tmp_path, **HYBRIDS[model_type])
    assert_same(quantised, plain)


def test_gpt_oss_experts(tmp_path: Path) -> None:
    """Stored by outputs in groups of 32 inputs; the library's own conversion is a second reference."""
    plain = save_tiny("gpt_oss", tmp_path / "plain")
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        parts = [mxfp4(matrix) for matrix in tensor.mT]  # [O, I] each
        blocks = torch.stack([part["weight_packed"].unflatten(1, (-1, 16)) for part, _ in parts])
        scales = torch.stack([part["weight_scale"] for part, _ in parts])
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = torch.stack([matrix for _, matrix in parts]).mT.contiguous()
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), tensors[name])
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised = write_stored(stored, described("mxfp4"), plain, tmp_path / "quantised")
    assert labels(quantised) == {"MXFP4 in groups of 32": 6}
    assert_same(quantised, plain)


def test_bfloat16_rounds_each_weight_once(tmp_path: Path) -> None:
    quantised, plain = save_quantised(CASES["gptq"], "llama", tmp_path, num_hidden_layers=1)
    got, expected = logits(quantised, dtype="bfloat16"), logits(plain, dtype="bfloat16")
    assert torch.equal(got, expected)


def test_a_side_file_describes_the_format(tmp_path: Path) -> None:
    """As in AutoGPTQ's folders; which version it has changes every zero."""
    quantised, plain = save_quantised(CASES["gptq"], "llama", tmp_path, num_hidden_layers=1)
    config = json.loads((quantised / "config.json").read_text())
    described = config.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no description says which version .* \(quantize_config.json\)"):
        check_model(quantised)
    (quantised / "quantize_config.json").write_text(json.dumps(described))
    assert_same(quantised, plain)
    digest = check_model(quantised).folder.config_digest
    (quantised / "quantize_config.json").write_text(json.dumps(described | {"checkpoint_format": "gptq_v2"}))
    assert check_model(quantised).folder.config_digest != digest


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
FIRST = "model.layers.0.mlp.down_proj"


def without(name: str) -> Change:
    return lambda tensors, config: tensors.pop(f"{FIRST}.{name}")


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update({f"{FIRST}.{name}": change(tensors[f"{FIRST}.{name}"]).contiguous()})


def with_setting(**settings: Any) -> Change:
    return lambda tensors, config: config.update(settings)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "no scale": ("fp8 blocks", without("weight_scale_inv"), "down_proj.weight .* F8_E4M3, and no scale"),
    "a scale of another size": (
        "fp8 blocks",
        with_tensor("weight_scale_inv", lambda scale: scale[:, :1].expand(-1, 97)),
        r"down_proj.weight .* its scale has shape \[2, 97\] where its values have \[64, 96\]",
    ),
    "a scale of a full weight": (
        "fp8 blocks",
        with_tensor("weight", lambda weight: weight.float()),
        "down_proj.weight_scale_inv .* belongs to no quantised tensor",
    ),
    "no zeros": ("gptq", without("qzeros"), "down_proj.qweight .*down_proj.qzeros is not stored"),
    "groups of another size": ("gptq", with_tensor("g_idx", lambda of: of[:-1]), "down_proj.qweight .* does not fit"),
    "words of another type": ("awq", with_tensor("qweight", lambda words: words.long()), "down_proj.qweight .* I64"),
    "an unknown version of GPTQ": ("gptq", with_setting(checkpoint_format="marlin"), "checkpoint_format marlin is not"),
    "zeros that symmetric codes do not have": (
        "gptq",
        with_setting(sym=True),
        "qweight .* its zero points are not those of symmetric codes, which its description names",
    ),
    "zeros of AWQ that symmetric codes do not have": (
        "awq symmetric",
        with_tensor("qzeros", lambda words: words - 0x11111111),
        "down_proj.qweight .* its zero points are not those of symmetric codes",
    ),
    "zeros of int8 values that symmetric ones do not have": (
        "compressed int8 with zeros",
        lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(symmetric=True),
        "weight .* its zero points are not those of symmetric values",
    ),
    "an order of values for one kernel": (
        "bitsandbytes int8",
        with_tensor("weight_format", lambda order: order + 2),
        r"down_proj.weight .* in the order of one kernel \(weight_format\)",
    ),
    "another version of AWQ": ("awq", with_setting(version="gemv"), "version gemv is not supported"),
    "another method": ("awq", with_setting(quant_method="hqq"), r"quantised \(hqq.*not supported"),
    "sparse weights": (
        "compressed int4",
        with_setting(sparsity_config={"format": "sparse-24-bitmask"}),
        r"stored sparsely \(sparse-24-bitmask\)",
    ),
    "transforms": ("compressed int4", with_setting(transform_config={"config_groups": {"R1": {}}}), "transformed"),
    "no shape": ("compressed int4", without("weight_shape"), "down_proj.weight_shape is not stored"),
    "no global scale": ("nvfp4", without("weight_global_scale"), "down_proj.weight_global_scale is not stored"),
    "values for one kernel": (
        "torchao int8 groups",
        with_setting(
            quant_type={"default": {"_type": "FqnToConfig", "_data": {"x": {"_type": "Int4WeightOnlyConfig"}}}}
        ),
        "weight:qdata .* in the layout of one kernel",
    ),
    "bad state": (
        "bitsandbytes nf4",
        with_tensor("weight.quant_state.bitsandbytes__nf4", lambda state: state[:-5]),
        "bitsandbytes__nf4 .* does not describe a quantised tensor",
    ),
    "blocks of another size": (
        "bitsandbytes nf4",
        with_tensor("weight.absmax", lambda absmax: absmax[:-1]),
        "bitsandbytes__nf4 .* its parts do not fit",
    ),
    "a bias that is not zero": (
        "gptq zero biases",
        with_tensor("bias", lambda bias: bias + 1),
        "down_proj.bias",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dequantised_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case, change, message = REFUSED[name]
    quantised, _ = save_quantised(CASES[case], "llama", tmp_path, num_hidden_layers=1)
    tensors = load_file(quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        check_model(quantised)


PEAK = """
import sys
from tests.models.loading import load_model
import torch
torch.set_num_threads(1)
def status(key):
    for line in open('/proc/self/status'):
        if line.startswith(key + ':'): return int(line.split()[1]) * 1024
options = {'dtype': 'bfloat16', 'device': 'cpu', 'products': 'torch', 'implementation': sys.argv[3]}
load_model(sys.argv[1], **options)  # do not count imported libraries
open('/proc/self/clear_refs', 'w').write('5')
before = status('VmRSS')
model = load_model(sys.argv[2], **options)
print(status('VmHWM') - before, 2 * model.spec.parameters)
"""


def fp8_of_ones(shape: torch.Size) -> dict[str, torch.Tensor]:
    scale = torch.ones(shape[0] // 128, shape[1] // 128)
    return {"weight": torch.ones(shape, dtype=torch.float8_e4m3fn), "weight_scale_inv": scale}


def gptq_of_zeros(shape: torch.Size) -> dict[str, torch.Tensor]:
    rows, columns = shape
    stored = {
        "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        "g_idx": torch.arange(columns).int() // 128,
    }
    zeros, scales = torch.zeros(columns // 128, rows // 8, dtype=torch.int32), torch.ones(columns // 128, rows)
    return stored | {"qzeros": zeros, "scales": scales.half()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory through /proc")
@pytest.mark.parametrize(
    ("store", "implementation"),
    [(fp8_of_ones, "native"), (gptq_of_zeros, "native"), (fp8_of_ones, "transformers")],
)
def test_peak_memory_is_the_weights_and_a_matrix(
    store: Callable[[torch.Size], dict[str, torch.Tensor]], implementation: str, tmp_path: Path
) -> None:
    small, large = save_tiny("llama", tmp_path / "small"), tmp_path / "large"
    write_large(large)
    tensors, stored = load_file(large / "model.safetensors"), {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        of_format = {f"{base}.{end}": part for end, part in store(tensor.shape).items()} if "_proj" in name else None
        stored |= of_format or {name: tensor}
    write_stored(stored, described("gptq" if store is gptq_of_zeros else "fp8", group_size=128), large, large)
    command = [sys.executable, "-c", PEAK, str(small), str(large), implementation]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    matrix = 2 * 2 * 3072 * 1024
    # The matrices that are being stacked, pieces of the one that is being dequantised, and the allocator's slack.
    assert weights < peak < weights + 2 * matrix + (64 << 20)
