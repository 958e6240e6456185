"""Fake packages of peers: they record every call, and generate the previous token plus one."""

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
import os
from types import SimpleNamespace

from fake_record import go_on, note

__version__ = "fake-ov"
SchedulerConfig = GenerationConfig = type("Config", (), {})


class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        note("pipeline", folder, device, properties, vars(scheduler))
        if properties["KV_CACHE_PRECISION"] in os.environ.get("FAKE_OV_LACKS", ""):
            raise RuntimeError("expect kvcache type f32")

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
        if options["dtype"] == "float32" and options["attention_backend"] is None:
            raise RuntimeError("flash attention has no float32")

    def flush_cache(self):
        note("flush_cache")

    def generate(self, input_ids, sampling_params):
        note("generate", input_ids, sampling_params)
        if len({params["n"] for params in sampling_params}) > 1:
            raise ValueError("these rows differ in their number of samples")
        return [
            {"output_ids": go_on(ids, params["max_new_tokens"])}
            for ids, params in zip(input_ids, sampling_params)
            for _ in range(params["n"])
        ]
"""

_VLLM = """\
import os
from types import SimpleNamespace

from fake_record import go_on, note

__version__ = "fake-vllm"


class SamplingParams:
    def __init__(self, **options):
        vars(self).update(options)


class LLM:
    def __init__(self, **options):
        self.eager = options["enforce_eager"]
        environment = {name: text for name, text in os.environ.items() if name.startswith(("VLLM_", "LD_PRELOAD"))}
        note("llm", options, environment)

    def reset_prefix_cache(self):
        note("reset", self.eager)

    def generate(self, prompts, params, use_tqdm):
        note("generate", self.eager, prompts, [vars(p) for p in params])
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=go_on(x["prompt_token_ids"], p.max_tokens)) for _ in range(p.n)],
                num_cached_tokens=1,
            )
            for x, p in zip(prompts, params)
        ]
"""

_CTRANSLATE2 = """\
import json
from pathlib import Path
from types import SimpleNamespace

from fake_record import go_on, note

__version__ = "fake-ct2"


def get_supported_compute_types(device):
    return {"int8", "float32"}


class Generator:
    def __init__(self, folder, **options):
        note("generator", json.loads((Path(folder) / "config.json").read_text()), options)
        self.compute_type = options["compute_type"]

    def generate_batch(self, prompts, **options):
        note("generate", prompts, options)
        made = [go_on([int(words[-1][1:])], options["max_length"]) for words in prompts]
        return [SimpleNamespace(sequences_ids=[ids]) for ids in made]
"""

_CTRANSLATE2_CONVERTERS = """\
import json
from pathlib import Path


class TransformersConverter:
    def __init__(self, model):
        self.model = model

    def convert(self, folder, force):
        (Path(folder) / "vocabulary.json").write_text(json.dumps([f"w{i}" for i in range(50)]))
        (Path(folder) / "config.json").write_text(json.dumps({"unk_token": None, "bos_token": None, "eos_token": "w3"}))
"""

_ONNXRUNTIME_GENAI = """\
import json

from fake_record import note

__version__ = "fake-ort"


class Config:
    def __init__(self, folder):
        self.options = None

    def overlay(self, text):
        self.options = json.loads(text)


class Model:
    def __init__(self, config):
        note("model", config.options)


class GeneratorParams:
    def __init__(self, model):
        self.options = {}

    def set_search_options(self, **options):
        self.options |= options


class Generator:
    def __init__(self, model, params):
        self.options = params.options

    def append_tokens(self, ids):
        note("append", ids.tolist(), self.options)
        self.rows = ids.tolist()
        self.last = [max(enumerate(row), key=lambda pair: (pair[1] != 0, pair[0]))[1] for row in self.rows]

    def is_done(self):
        return len(self.rows[0]) == self.options["max_length"]

    def generate_next_token(self):
        self.last = [token + 1 for token in self.last]
        self.rows = [row + [token] for row, token in zip(self.rows, self.last)]

    def get_sequence(self, row):
        return self.rows[row]
"""

_ONNXRUNTIME_BUILDER = """\
import json, sys
from pathlib import Path

from fake_record import note

note("build", sys.argv[1:])
(Path(sys.argv[sys.argv.index("-o") + 1]) / "genai_config.json").write_text(json.dumps({"model": {"pad_token_id": 0}}))
"""

_LLAMA_CPP = """\
import ctypes
from types import SimpleNamespace

from fake_record import note

__version__ = "fake-llama"
VOCAB = 50


def nothing(*arguments):
    pass


def make(*arguments):
    return SimpleNamespace()


llama_backend_init = llama_batch_free = llama_free = nothing
llama_model_default_params = llama_context_default_params = llama_model_get_vocab = make


def llama_model_load_from_file(path, params):
    note("load", path.decode())
    return SimpleNamespace()


def llama_vocab_n_tokens(vocab):
    return VOCAB


def llama_init_from_model(model, params):
    note("context", vars(params))
    return SimpleNamespace(cells={}, params=params)


def llama_get_memory(context):
    return context


def llama_memory_clear(memory, data):
    memory.cells = {}


def llama_memory_seq_cp(memory, source, target, begin, end):
    assert memory.params.kv_unified, "else only whole sequences are copied"
    note("copy", source, target, begin, end)
    for position in range(begin, end):
        memory.cells[target, position] = memory.cells[source, position]


def llama_batch_init(tokens, embedding, sequences):
    return SimpleNamespace(
        token=[0] * tokens, pos=[0] * tokens, logits=[0] * tokens, n_seq_id=[0] * tokens,
        seq_id=[[0] for _ in range(tokens)],
    )


def llama_decode(context, batch):
    assert 0 < batch.n_tokens <= context.params.n_batch
    outputs = []
    for at in range(batch.n_tokens):
        sequence, position = batch.seq_id[at][0], batch.pos[at]
        assert batch.n_seq_id[at] == 1 and sequence < context.params.n_seq_max
        assert position == 0 or (sequence, position - 1) in context.cells, "a token comes after those before it"
        assert (sequence, position) not in context.cells
        context.cells[sequence, position] = batch.token[at]
        if batch.logits[at]:
            outputs.append(batch.token[at] + 1)
    note("decode", batch.n_tokens)
    context.logits = (ctypes.c_float * (len(outputs) * VOCAB))()
    for row, token in enumerate(outputs):
        context.logits[row * VOCAB + token] = 60.0
    return 0


def llama_get_logits(context):
    return context.logits
"""

_GGUF = """\
from types import SimpleNamespace

from fake_record import note

GGMLQuantizationType = SimpleNamespace(F32="F32", F16="F16", BF16="BF16")
quants = SimpleNamespace(quantize=lambda values, kind: values)


class GGUFWriter:
    def __init__(self, path, family):
        self.path = path
        note("family", family)

    def add_tensor(self, name, values, raw_dtype="F32"):
        note("tensor", name, list(values.shape), raw_dtype, float(values.sum()))

    def write_tensors_to_file(self):
        open(self.path, "w").close()

    def __getattr__(self, name):
        return lambda *arguments: note(name, *arguments)
"""

_FILES = {
    "fake_record.py": _RECORD,
    "openvino.py": _OPENVINO,
    "openvino_genai.py": _OPENVINO_GENAI,
    "optimum/__init__.py": "",
    "optimum/intel.py": _OPTIMUM_INTEL,
    "sglang.py": _SGLANG,
    "vllm.py": _VLLM,
    "ctranslate2/__init__.py": _CTRANSLATE2,
    "ctranslate2/converters.py": _CTRANSLATE2_CONVERTERS,
    "onnxruntime_genai/__init__.py": _ONNXRUNTIME_GENAI,
    "onnxruntime_genai/models/__init__.py": "",
    "onnxruntime_genai/models/builder.py": _ONNXRUNTIME_BUILDER,
    "llama_cpp.py": _LLAMA_CPP,
    "gguf.py": _GGUF,
}


def write(folder: Path) -> None:
    """Put the packages where `PYTHONPATH` is to point."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
