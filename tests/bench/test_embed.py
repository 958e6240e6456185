"""`batchgen bench embed`: its lines, its gate and its peers. Tests no times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchgen.bench.command import run_command
from batchgen.bench.config import BenchConfig
from batchgen.bench.gate import GateFailed
from batchgen.bench.jobs import embed
from batchgen.bench.jobs.commands import CommandFailed
from batchgen.errors import UsageError
from tests.bench.fakes import silent_console

CONFIG = BenchConfig(workloads=("embed",), model="random:tiny", peers="none", repeat=1, cpu_threads=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": "vllm=/usr/bin/python3"}, "has the peer sentence-transformers=PYTHON"),
        ({"model": "random:135"}, "has random:minilm, random:bert-base, random:tiny and folders"),
        ({"device": "cuda"}, "--device has no effect on embed"),
    ],
)
def test_wrong_options(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_command(replace(CONFIG, **changes), print, silent_console())


def test_vectors_are_compared_by_their_cosines() -> None:
    one = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
    assert embed._least_cosine(one, 3 * one) == pytest.approx(1)
    assert embed._least_cosine(one, np.array([[1.0, 0.0], [1.0, 1.0]])) == pytest.approx(0.5**0.5)


@pytest.mark.slow
def test_both_engines_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    ours, peer = embed.embed_lines(replace(CONFIG, peers="auto"), rows=40)
    assert [ours["engine"], peer["engine"]] == ["batchgen", "sentence-transformers"]
    assert ours["tokens"] == peer["tokens"] > 40 * 8
    assert min(ours["tokens_per_second"], peer["tokens_per_second"], ours["cpu_seconds"]) > 0
    assert (ours["ratio"], ours["batch"]) == (1, None)
    assert peer["batch"] in (8, 16, 32, 64, 128, 256)
    assert min(peer["least_cosine"], peer["least_cosine_float32"]) > 0.9999
    monkeypatch.setattr(embed, "LEAST_COSINE", 1.1)
    with pytest.raises(GateFailed, match="cosine"):
        list(embed.embed_lines(CONFIG, rows=8))
    monkeypatch.setattr(embed, "_SCRIPTS", {"batchgen": "raise ValueError('no engine')"})
    with pytest.raises(CommandFailed, match="batchgen failed: ValueError: no engine"):
        list(embed.embed_lines(CONFIG, rows=8))


def test_a_peer_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\nencode = lambda texts, batch: [[1.0]] * len(texts)\n"
    monkeypatch.setattr(embed, "_SCRIPTS", dict.fromkeys(embed._SCRIPTS, code))
    with pytest.raises(UsageError, match=r"cannot run /no/python: .*; give --peers sentence-transformers=PYTHON"):
        list(embed.embed_lines(replace(CONFIG, peers="sentence-transformers=/no/python"), rows=8))
