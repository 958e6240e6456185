"""Packages of peers that compute nothing: each call is written down, and a token is the one before it plus one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write"]

_RECORD = """\
import json, os


def note(name, *arguments):
    with open(os.environ["FAKE_RECORD"], "a") as file:
        file.write(json.dumps([name, arguments]) + "\\n")


def go_on(ids, new):
    return [int(ids[-1]) + i for i in range(1, new + 1)]
"""

_OPENVINO = """\
import numpy as np

__version__ = "2026-fake"


class Tensor:
    def __init__(self, values):
        assert values.dtype == np.int64 and values.shape[0] == 1
        self.ids = values[0].tolist()
"""

_OPENVINO_GENAI = """\
from types import SimpleNamespace

from fake_record import go_on, note

__version__ = "fake-ov"
SchedulerConfig = GenerationConfig = type("Config", (), {})


class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        note("pipeline", folder, device, properties, vars(scheduler))

    def generate(self, tensors, configs):
        note("generate", *[(t.ids, vars(c)) for t, c in zip(tensors, configs)])
        new = [c.max_new_tokens for c in configs]
        return [SimpleNamespace(m_generation_ids=[go_on(t.ids, n)]) for t, n in zip(tensors, new)]
"""

_OPTIMUM_INTEL = """\
from pathlib import Path

from fake_record import note


class OVModelForCausalLM:
    @staticmethod
    def from_pretrained(model, **options):
        note("export", model, options)
        return OVModelForCausalLM()

    def save_pretrained(self, folder):
        (Path(folder) / "openvino_model.xml").touch()
"""

_SGLANG = """\
from fake_record import go_on, note

__version__ = "fake-sglang"


class Engine:
    def __init__(self, **options):
        note("engine", options)

    def flush_cache(self):
        note("flush_cache")

    def generate(self, input_ids, sampling_params):
        note("generate", input_ids, sampling_params)
        return [
            {"output_ids": go_on(ids, params["max_new_tokens"])}
            for ids, params in zip(input_ids, sampling_params)
            for _ in range(params["n"])
        ]
"""

_FILES = {
    "fake_record.py": _RECORD,
    "openvino.py": _OPENVINO,
    "openvino_genai.py": _OPENVINO_GENAI,
    "optimum/__init__.py": "",
    "optimum/intel.py": _OPTIMUM_INTEL,
    "sglang.py": _SGLANG,
}


def write(folder: Path) -> None:
    """Put the packages where `PYTHONPATH` is to point."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
