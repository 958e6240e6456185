"""Memory of prompt logprobs: by formula for 32k tokens, K = 20 and a vocabulary of 152k, and measured for less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchgen.engine.capture.prompt_logprobs import LOGITS_BYTES, PendingPromptLogprobs, PromptLogprobs
from batchgen.engine.engine import Engine
from batchgen.request.fields.params import SamplingParams
from tests.engine.jobs import finish
from tests.engine.reference import save_word_tokenizer
from tests.models.tiny import VOCAB, save_tiny

pytestmark = pytest.mark.field("logprob_start_len", "top_logprobs_num")
LIMIT = 600 << 20
LARGE, TOKENS, K = 151_936, 32_768, 20


def kept_bytes(tokens: int, k: int, ids: int = 0) -> int:
    """Bytes stored for `tokens` positions: the target's logprob, K ids and logprobs, logprobs of `ids` ids."""
    return tokens * (4 + 8 * k + 4 * ids)


def test_the_formula() -> None:
    """Three copies of one chunk's logits (head, float32, top K), and three of the stored values."""
    assert LOGITS_BYTES // (4 * LARGE) > 1
    assert 3 * LOGITS_BYTES + 3 * kept_bytes(TOKENS, K) < LIMIT // 2


def test_what_the_formula_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits per call, and stored bytes, for a long prompt and a small vocabulary."""
    rows_at_once = 5
    monkeypatch.setattr("batchgen.engine.capture.prompt_logprobs.LOGITS_BYTES", rows_at_once * 4 * VOCAB)
    save_word_tokenizer(tmp_path, VOCAB)
    engine = Engine(str(save_tiny("llama", tmp_path)), dtype="float32", max_tokens_per_step=64, max_num_seqs=4)
    head, calls, kept = engine.model.logits, [], [0]

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return head(hidden)

    engine.model.logits = counted  # type: ignore[method-assign]
    collect = PromptLogprobs.collect

    def measured(self: PromptLogprobs, pending: PendingPromptLogprobs) -> None:
        collect(self, pending)
        kept.append(self.buffers.nbytes)

    monkeypatch.setattr(PromptLogprobs, "collect", measured)
    ids = [3 + i % (VOCAB - 3) for i in range(400)]
    asked = SamplingParams(
        max_new_tokens=0, return_logprob=True, logprob_start_len=0, top_logprobs_num=7, token_ids_logprob=(5, 6)
    )
    (done,) = finish(engine, [(ids, asked)])
    assert done.error is None
    assert max(calls) == rows_at_once
    assert sum(calls) == len(ids), "each position once, and the last one for sampling"
    assert max(kept) == kept_bytes(len(ids) - 1, 7, 2)


JOB = """
import json, sys
from pathlib import Path
from batchgen.cli.app import main
folder, tokens, asked = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "asked"
row = {"input_ids": [3 + i * 7919 % 5000 for i in range(tokens)], "max_new_tokens": 1, "temperature": 0}
if asked:
    row |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
source = folder / f"{sys.argv[3]}.jsonl"
source.write_text(json.dumps(row))
sys.argv[1:] = ["run", str(source), "--model", str(folder), "--dtype", "float32", "--progress", "none", "--overwrite"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10)
"""


def peak(folder: Path, tokens: int, asked: str) -> int:
    """Peak resident memory of a whole job, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(folder), str(tokens), asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the vocabulary of a large one."""
    folder = tmp_path_factory.mktemp("large")
    save_word_tokenizer(folder, VOCAB)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": TOKENS + 64}
    return save_tiny("llama", folder, vocab_size=LARGE, tie_word_embeddings=True, **sizes)


@pytest.mark.slow
def test_a_job_of_2k_tokens_and_a_vocabulary_of_152k(large: Path) -> None:
    """[tokens, V] in float32 would take 1.2 GB."""
    assert peak(large, 2048, "asked") - peak(large, 2048, "plain") < LIMIT
