"""`check` says what memory a run takes: its peak of resident memory, measured from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.runner import batchgen
from tests.engine.test_hybrid import TYPES
from tests.models.tiny import save_tiny
from tests.models.tiny_media import save_media

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "lfm2", "qwen3_next"))],
)
def test_the_peak_is_within_a_tenth_of_the_estimate(model_type: str, tmp_path: Path) -> None:
    sizes = TYPES.get(model_type, {}) | {"vocab_size": 80_000, "hidden_size": 512, "tie_word_embeddings": True}
    model = save_tiny(model_type, tmp_path / "model", **sizes)
    rows = [{"input_ids": [3 + i, 5, 6], "max_new_tokens": 5, "ignore_eos": True} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["rows.jsonl", "--model", model, "--tokenizer", ROOT / "batchgen" / "demo" / "model", "--device", "cpu"]
    options += ["--dtype", "float32"]
    checked = batchgen(["check", *options, "--json"], tmp_path)
    expected = json.loads(checked.stdout)["estimated_peak_bytes"]
    assert expected > 80_000 * 512 * 4 * 2, "too small to tell the weights from the program"
    measured = _peak([*map(str, options), "-o", "out.parquet"], tmp_path)
    assert abs(measured / expected - 1) < 0.1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_the_peak_of_a_job_with_images_has_its_towers(tmp_path: Path) -> None:
    whole, _ = save_media("llava", tmp_path / "model")
    whole.config.vision_config.update({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10})
    type(whole)(whole.config).save_pretrained(tmp_path / "model")
    for number in range(20):
        Image.new("RGB", (40, 40), (number, 9, 9)).save(tmp_path / f"{number}.png")
    rows = [{"text": "<image>", "image_data": f"{i}.png", "max_new_tokens": 9, "ignore_eos": True} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ["rows.jsonl", "--model", tmp_path / "model", "--device", "cpu", "--dtype", "float32"]
    options += ["--media-root", tmp_path, "--max-model-len", "128"]
    report = json.loads(batchgen(["check", *options, "--json"], tmp_path).stdout)
    assert report["tower_bytes"] > 300_000_000, "too small to tell them from the program"
    measured = _peak([*map(str, options), "-o", "out.parquet"], tmp_path)
    assert abs(measured / report["estimated_peak_bytes"] - 1) < 0.1


def _peak(arguments: list[str], folder: Path) -> int:
    """Peak of resident bytes of `batchgen run`."""
    command = [sys.executable, "-m", "batchgen", "run", *arguments]
    peak = 0
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(line.split()[1]) << 10 for line in status.splitlines() if line[:6] == "VmHWM:")])
            time.sleep(0.01)
    assert process.returncode == 0
    return peak
