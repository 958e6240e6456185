"""Fake packages of peers: they generate the previous token plus one, and record what the tests ask about."""

from __future__ import annotations

from pathlib import Path

_RECORD = """\
import json, os
def note(name, *arguments):
    with open(os.environ["FAKE_RECORD"], "a") as file:
        file.write(json.dumps([name, arguments]) + "\\n")
def go_on(ids, new):
    return [int(ids[-1]) + i for i in range(1, new + 1)]
"""

_OPENVINO = """\
__version__ = "2026-fake"
Tensor = lambda values: type("Tensor", (), {"ids": values[0].tolist()})
"""

_OPENVINO_GENAI = """\
import os
from types import SimpleNamespace
from fake_record import go_on, note
__version__ = "fake-ov"
SchedulerConfig = GenerationConfig = type("Config", (), {})
class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        note("built", properties, vars(scheduler))
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
    def from_pretrained(model, **options):
        note("export", model)
        return OVModelForCausalLM()
    def save_pretrained(self, folder):
        (Path(folder) / "openvino_model.xml").touch()
"""

_SGLANG = """\
from fake_record import go_on, note
__version__ = "fake-sglang"
class Engine:
    def __init__(self, **options):
        note("built", options)
        if options["dtype"] == "float32" and options["attention_backend"] is None:
            raise RuntimeError("flash attention has no float32")
    def flush_cache(self):
        note("reset")
    def generate(self, input_ids, sampling_params):
        note("generate", sampling_params)
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
SamplingParams = SimpleNamespace
class LLM:
    def __init__(self, **options):
        note("built", options, {name: text for name, text in os.environ.items() if name.startswith("VLLM_")})
    def reset_prefix_cache(self):
        note("reset")
    def generate(self, prompts, params, use_tqdm):
        note("generate", [vars(p) for p in params])
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=go_on(x["prompt_token_ids"], p.max_tokens)) for _ in range(p.n)],
                num_cached_tokens=1,
            )
            for x, p in zip(prompts, params)
        ]
"""

_VLLM_PLATFORMS = """\
import os
current_platform = type(os.environ.get("FAKE_PLATFORM", "CpuPlatform"), (), {})()
"""

_LLAMA_CPP = """\
import ctypes
from types import SimpleNamespace
from fake_record import note
__version__ = "fake-llama"
VOCAB = 50
llama_backend_init = llama_batch_free = llama_free = lambda *arguments: None
llama_model_default_params = llama_context_default_params = llama_model_get_vocab = lambda *arguments: SimpleNamespace()
def llama_model_load_from_file(path, params):
    note("model", path.decode())
    return SimpleNamespace()
llama_vocab_n_tokens = lambda vocab: VOCAB
llama_init_from_model = lambda model, params: SimpleNamespace(cells={}, params=params)
llama_get_memory = lambda context: context
def llama_memory_clear(memory, data):
    memory.cells = {}
def llama_memory_seq_cp(memory, source, target, begin, end):
    assert memory.params.kv_unified, "else only whole sequences are copied"
    note("copy", end)
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
        assert len(context.cells) < context.params.n_ctx
        context.cells[sequence, position] = batch.token[at]
        if batch.logits[at]:
            outputs.append(batch.token[at] + 1)
    context.logits = (ctypes.c_float * (len(outputs) * VOCAB))()
    for row, token in enumerate(outputs):
        context.logits[row * VOCAB + token] = 60.0
    return 0
llama_get_logits = lambda context: context.logits
"""

_FILES = {
    "fake_record.py": _RECORD,
    "openvino.py": _OPENVINO,
    "openvino_genai.py": _OPENVINO_GENAI,
    "optimum/__init__.py": "",
    "optimum/intel.py": _OPTIMUM_INTEL,
    "sglang.py": _SGLANG,
    "vllm/__init__.py": _VLLM,
    "vllm/platforms.py": _VLLM_PLATFORMS,
    "zentorch-2.13.dist-info/METADATA": "Metadata-Version: 2.1\nName: zentorch\nVersion: 2.13\n",
    "llama_cpp.py": _LLAMA_CPP,
}


def write(folder: Path) -> None:
    """Put the packages where `PYTHONPATH` is to point."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
