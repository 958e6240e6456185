"""`batchgen bench embed`: embeddings of texts of 8 to 256 tokens, next to the `encode` of sentence-transformers.

Both engines run in separate processes with equal threads, and alternate. The peer tries its batch sizes in
every repeat, and the fastest counts. Vectors in float32 must agree first.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import batchgen
from batchgen.bench.config import BenchConfig
from batchgen.bench.gate import GateFailed
from batchgen.bench.jobs.commands import CommandFailed
from batchgen.bench.machine import machine
from batchgen.bench.process import run_code
from batchgen.errors import UsageError

PEER: Final = "sentence-transformers"
SHAPES: Final = {"random:minilm": (384, 6, 1536), "random:bert-base": (768, 12, 3072), "random:tiny": (64, 2, 128)}
"""Hidden size, blocks and inner size of random encoders; heads have 32 or 64 numbers."""
LEAST_COSINE: Final = 0.9999
"""Of the vectors of the two engines in float32."""
_WORDS: Final = 30_000
_CHECKED: Final = 32
_SCRIPTS: Final = {
    "batchgen": """
import batchgen
engine = batchgen.Engine(model, dtype=dtype, cpu_threads=threads)
def encode(texts, batch):
    done = engine.generate([{"text": text, "embed": True} for text in texts], ordered=True, progress=False)
    return [completion.embedding for completion in done]
""",
    PEER: """
import torch
torch.set_num_threads(threads)
from sentence_transformers import SentenceTransformer
engine = SentenceTransformer(model, device="cpu", model_kwargs={} if dtype == "auto" else {"dtype": dtype})
def encode(texts, batch):
    return engine.encode(texts, batch_size=batch, convert_to_numpy=True)
""",
}
_SERVE: Final = """
import json, sys, time
model, dtype, threads, file, batches, vectors = json.loads(sys.argv[1])
texts = json.load(open(file))
%s
import numpy as np
np.save(vectors, np.asarray(encode(texts[:32], 32), np.float32))
best = None
for batch in batches:
    wall, cpu = time.perf_counter(), time.process_time()
    encode(texts, batch)
    taken = time.perf_counter() - wall, time.process_time() - cpu, batch
    best = taken if best is None or taken < best else best
print(json.dumps(best))
"""


def embed_lines(config: BenchConfig, rows: int = 1024) -> Iterator[dict[str, Any]]:
    """Measure `rows` texts. The metric is tokens a second of wall time, the median of the repeats.

    Raises:
        UsageError: another peer, or a random shape that is not known.
        CommandFailed: an engine failed.
        GateFailed: the vectors in float32 differ.
    """
    name = "random:minilm" if config.model == BenchConfig().model else config.model
    engines, threads = {"batchgen": sys.executable, **_peer(config.peers)}, config.cpu_threads or os.cpu_count() or 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(batchgen.__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="batchgen-embed-") as scratch:
        folder = Path(scratch)
        model, texts, tokens = _workload(name, folder, rows)

        def run(engine: str, dtype: str, texts: list[str], batches: tuple[int, ...]) -> tuple[Any, Any]:
            file, vectors = folder / "texts.json", folder / "first.npy"
            file.write_text(json.dumps(texts))
            request = json.dumps([str(model), dtype, threads, str(file), batches, str(vectors)])
            done = run_code(engine, engines[engine], _SERVE % _SCRIPTS[engine], request, env=environment)
            if done.returncode:
                raise CommandFailed(f"{engine} failed: {done.stderr.strip().rpartition(chr(10))[2]}")
            return json.loads(done.stdout.splitlines()[-1]), np.load(vectors, allow_pickle=False)

        exact = {engine: run(engine, "float32", texts[:_CHECKED], (32,))[1] for engine in engines}
        cosines = {engine: _least_cosine(exact["batchgen"], vectors) for engine, vectors in exact.items()}
        if not min(cosines.values()) >= LEAST_COSINE:
            raise GateFailed(f"vectors in float32 have a cosine of {min(cosines.values()):.6f} only")
        batches = {"batchgen": (0, 0), PEER: (8, 16, 32, 64, 128, 256)}  # the first pass of ours warms up, too
        rounds = [{e: run(e, config.dtype, texts, batches[e]) for e in engines} for _ in range(config.repeat)]
        passes = {engine: [each[engine] for each in rounds] for engine in engines}
    rates = {engine: median(tokens / taken[0] for taken, _ in each) for engine, each in passes.items()}
    for engine, each in passes.items():
        yield {
            "workload": "embed", "model": name, "engine": engine, "dtype": config.dtype, "rows": rows,
            "tokens": tokens, "threads": threads, "tokens_per_second": rates[engine],
            "cpu_seconds": median(taken[1] for taken, _ in each), "batch": each[-1][0][2] or None,
            "ratio": rates["batchgen"] / rates[engine], "least_cosine_float32": cosines[engine],
            "least_cosine": _least_cosine(exact["batchgen"], each[-1][1]), "repeat": config.repeat, **machine(),
        }  # fmt: skip


def _peer(peers: str) -> dict[str, str]:
    """Name -> interpreter of the peer, if there is one."""
    if peers in ("auto", "none"):
        return {PEER: sys.executable} if peers == "auto" and find_spec("sentence_transformers") is not None else {}
    name, _, python = peers.partition("=")
    if name != PEER:
        raise UsageError(f"--peers: workload embed has the peer {PEER}=PYTHON, got {peers!r}")
    return {PEER: python or sys.executable}


def _least_cosine(one: Any, other: Any) -> float:
    return float(((one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)).min())


def _workload(name: str, folder: Path, rows: int) -> tuple[Path, list[str], int]:
    """The model's folder, texts of 8 to 256 tokens (with the tokenizer of a given model, of others), and all tokens."""
    from transformers import AutoTokenizer, BertConfig, BertModel, BertTokenizerFast  # slow to import

    rng, model = random.Random(0), Path(name)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(_WORDS)]
    shape = SHAPES.get(name)
    if shape is None and name.startswith("random:"):
        raise UsageError(f"--model: workload embed has {', '.join(SHAPES)} and folders of encoders, got {name!r}")
    if shape is not None:
        (hidden, blocks, inner), model = shape, folder / "model"
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(words))]
        (folder / "vocab.txt").write_text("\n".join(vocabulary))
        BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(model)
        sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "intermediate_size": inner}
        heads = {"num_attention_heads": hidden // (32 if hidden < 512 else 64), "vocab_size": len(vocabulary)}
        BertModel(BertConfig(**sizes, **heads)).save_pretrained(model)
    texts = [" ".join(rng.choices(words, k=rng.randint(6, 254))) for _ in range(rows)]
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    return model, texts, sum(map(len, tokenizer(texts)["input_ids"]))
