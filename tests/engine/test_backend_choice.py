"""The choice of a kernel backend: by name, measured on the workload, or rejected; and whole jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import triton

import batchgen.engine.backend_choice as engine_kernels
import batchgen.kernels.backend as backend
from batchgen.config.engine_config import EngineConfig
from batchgen.config.python_words import in_python
from batchgen.demo import model_path
from batchgen.engine.backend_choice import fixed_kernels, kernels_for, typical_step
from batchgen.engine.engine import Engine
from batchgen.engine.workload import plan_workload
from batchgen.errors import UsageError
from batchgen.request.fields.params import SamplingParams
from batchgen.request.table.request_table import RequestTable
from tests.e2e.runner import run
from tests.engine.fake_device import LateDevice
from tests.kernels.flash.fake_flash import Fakes, fakes
from tests.models.loading import inspect_model

TRITON = f"triton {triton.__version__}"
SPEC = inspect_model(model_path(), dtype="float16", device="cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fakes(monkeypatch) as made:
        yield made


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is treated as a Hopper GPU, on which flash attention takes half of Triton's time."""
    monkeypatch.setattr(engine_kernels, "capability_of", lambda device: (9, 0))

    def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
        def milliseconds(call: Callable[[], object]) -> float:
            call()
            return 0.1 if "FlashAttention" in str(call) else 0.2

        return milliseconds

    monkeypatch.setattr(backend, "device_timer", clock)


@pytest.fixture
def library(fake: Fakes, tmp_path: Path) -> Path:
    return fake.write(tmp_path / "lib" / "_vllm_fa3_C.abi3.so", 3)


def table(*requests: tuple[list[int], int, int]) -> RequestTable:
    """A table of (prompt ids, number of samples, max_new_tokens)."""
    made = RequestTable()
    for i, (ids, samples, tokens) in enumerate(requests):
        made.append(i, 0, ids, SamplingParams(n=samples, temperature=1.0), i, tokens)
    return made


# Typical steps


def step(made: RequestTable, rows: int = 256, tokens: int = 8192) -> Any:
    return typical_step(EngineConfig(), SPEC, plan_workload(made), rows, tokens)


PREFIX = list(range(100))
STEPS = {
    "prompts that share": ([(PREFIX + [200 + i] * 20, 1, 60) for i in range(10)], (10, 120 + 30 + 1, 100, 300 // 60)),
    "separate prompts": ([(PREFIX[:50], 1, 10), (PREFIX[70:], 1, 30)], (2, 40 + 10 + 1, 0, 80 // 20)),
}


@pytest.mark.parametrize(("requests", "expected"), STEPS.values(), ids=STEPS)
def test_typical_steps(requests: list[tuple[list[int], int, int]], expected: tuple[int, ...]) -> None:
    typical = step(table(*requests))
    assert (typical.rows, typical.context, typical.shared, typical.chunk) == expected
    assert (typical.heads, typical.layer, typical.dtype) == (4, SPEC.kv_layers[0], torch.float16)


def test_limits_of_a_typical_step() -> None:
    samples = step(table((list(range(50)), 6, 10)), rows=4)
    assert (samples.rows, samples.context, samples.shared) == (4, 56, 50)
    assert step(table(*(([i] * 500, 1, 1) for i in range(64))), tokens=2048).chunk == 2048 - 64
    assert step(RequestTable()) is None


# Rejected options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": "flash"},
            "`--attention flash` cannot run here: it needs an NVIDIA GPU, and this run computes on the CPU; leave the "
            "option out to use the best available kernels",
        ),
        ({"flash_library": "no.so"}, "`--flash-library no.so`: there is no such file or folder"),
    ],
)
def test_options_are_rejected_before_a_row_is_read(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        Engine(str(model_path()), **options)
    assert str(refused.value) == in_python(message)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    # Without --device, `check` plans for a GPU on another machine.
    for command in (["run"], ["check", "--device", "cpu"]):
        assert run([*command, rows, *flags], tmp_path, expect=2).stderr.endswith(f"error: {message}\n")
    assert list(tmp_path.iterdir()) == [rows]


def test_flash_without_a_library_names_the_searched_packages(hopper: None) -> None:
    with pytest.raises(UsageError) as refused:
        fixed_kernels(EngineConfig(attention="flash"), SPEC)
    assert str(refused.value) == (
        "`--attention flash` cannot run here: vLLM is not installed; the package vllm_flash_attn is not installed; "
        "install vLLM, give the path of its compiled library with --flash-library, or leave the option out"
    )


def test_flash_rejects_a_float32_model(hopper: None, library: Path) -> None:
    spec = inspect_model(model_path(), dtype="float32", device="cpu")
    with pytest.raises(UsageError, match=r"it supports bfloat16 and float16, not float32 \(see --dtype\); leave"):
        fixed_kernels(EngineConfig(attention="flash", flash_library=str(library)), spec)


def test_a_named_backend_on_a_gpu_is_chosen_with_the_workload(hopper: None, library: Path) -> None:
    config = EngineConfig(attention="flash", flash_library=str(library))
    assert fixed_kernels(config, SPEC) is None
    workload = plan_workload(table(([1, 2, 3], 1, 4)))
    assert kernels_for(config, SPEC, workload, 8, 64).description == f"flash-attn 3 of {library}"


def test_torch_does_not_depend_on_the_workload(hopper: None) -> None:
    fixed = fixed_kernels(EngineConfig(attention="torch"), SPEC)
    assert fixed.description == "torch"


# Whole jobs


PROMPTS = ["Sort: 3 1 2", "Sort: 3 1 2 and 5", "What is 1 + 2?"]


def generate(**options: Any) -> tuple[list[list[int]], str]:
    engine = Engine(str(model_path()), dtype="float16", device="cpu", **options)
    params = SamplingParams(temperature=0.0, max_new_tokens=3)
    done = engine.generate([{"text": p, "n": 2} for p in PROMPTS], params, ordered=True)
    return [list(c.output_ids) for c in done], engine.kernels


def test_flash_is_measured_and_used(hopper: None, library: Path, fake: Fakes) -> None:
    expected, kernels = generate(attention="torch")
    assert kernels == "torch"
    fake.forwards.clear()
    ids, kernels = generate(flash_library=str(library), page_size=4)
    assert kernels == f"flash-attn 3 of {library} (faster than {TRITON}: 0.1 ms against 0.2 ms a layer)"
    assert ids == expected
    assert len(fake.forwards) > 10


def test_flash_computes_prompts_and_graphs_decode(hopper: None, library: Path, fake: Fakes) -> None:
    """Whole steps: those that only decode are Triton's graphs, and flash runs the others."""
    config = {"dtype": "float16", "device": "cpu", "page_size": 4, "flash_library": str(library)}
    rows = [{"input_ids": [5 + i, 6, 7], "temperature": 0, "max_new_tokens": 6, "ignore_eos": True} for i in range(3)]
    expected = list(Engine(str(model_path()), **{**config, "attention": "torch"}).generate(rows, ordered=True))
    engine = Engine(str(model_path()), **config, attention="flash")
    engine.device = LateDevice(captures=True)
    fake.forwards.clear()
    done = list(engine.generate(rows, ordered=True))
    assert [list(c.output_ids) for c in done] == [list(c.output_ids) for c in expected]
    counts = engine.last_run.loop.counts()
    assert counts["graph_replays"] + counts["graph_first"] == 5, "all steps but the first"
    assert len(fake.forwards) == engine.model.spec.num_layers, "one step"


def test_the_footer_and_the_report_name_the_kernels(hopper: None, library: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "Sort: 3 1"}\n')
    sizes = ["--max-new-tokens", "1", "--page-size", "4", "--flash-library", str(library)]
    flags = ["--dtype", "float16", "--device", "cpu", *sizes, "--report", "-"]
    done = run(["run", "rows.jsonl", "-o", "out.parquet", *flags], tmp_path)
    described = f"flash-attn 3 of {library} (faster than {TRITON}: 0.1 ms against 0.2 ms a layer)"
    assert described in done.report["kernels"]
    assert described not in done.stderr
    assert described in str(pq.read_schema(tmp_path / "out.parquet").metadata)
