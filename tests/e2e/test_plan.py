"""`batchgen plan`: what it predicts of jobs whose work is known, from machines whose rates are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchgen.demo import model_path
from tests.e2e.runner import run

ENDLESS = 'device = "cpu"\nstart_seconds = 0\nrow_ms = 0\nload_gb_per_second = 1e9\ndoubt = 0\n'
"""A machine on which nothing takes time but what is added."""
FAST = "tflops = 1e12\nmemory_gb_per_second = 1e15\n"


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def fixed(prompt: int, output: int, first: int = 5) -> dict[str, Any]:
    """A row of a known length."""
    ids = [first + number % 50 for number in range(prompt)]
    return {"input_ids": ids, "max_new_tokens": output, "ignore_eos": True, "temperature": 0}


def plan(folder: Path, machine: str, *options: str, devices: str = "1") -> dict[str, Any]:
    (folder / "box.toml").write_text(machine)
    command = ("plan", "rows.jsonl", "--machine", "box.toml", "--devices", devices, "--json", *options)
    figures: dict[str, Any] = json.loads(run(command, folder).stdout)
    return figures


def test_steps_cost_what_the_file_says(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(40, 30)])
    (one,) = plan(tmp_path, f"{ENDLESS}{FAST}step_ms = 1000\nprice_per_hour = 7200\n")["devices"]
    assert one["seconds"] == pytest.approx(30, rel=1e-3)  # the first step computes the prompt and draws a token
    assert one["cost"] == pytest.approx(60, rel=1e-3)
    assert one["limited_by"] == "steps"
    assert one["seconds_min"] == pytest.approx(one["seconds_max"], rel=1e-3)


def test_a_step_reads_the_weights(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(40, 30)])
    size = json.loads(run(["check", "rows.jsonl", "--json"], tmp_path).stdout)["model"]["weight_bytes"]
    (one,) = plan(tmp_path, f"{ENDLESS}tflops = 1e12\nmemory_gb_per_second = {size / 1e9}\nstep_ms = 0\n")["devices"]
    assert one["limited_by"] == "memory bandwidth"
    assert 30 <= one["seconds"] < 31  # and the cached keys and values


def test_products_start_and_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(100, 1)] * 3)
    machine = f"{ENDLESS}memory_gb_per_second = 1e15\nstep_ms = 0\n"
    slow, fast = (plan(tmp_path, f"{machine}tflops = {rate}\n")["devices"][0] for rate in ("1e-6", "2e-6"))
    assert slow["limited_by"] == "matrix products"
    assert slow["seconds"] == pytest.approx(2 * fast["seconds"], rel=1e-3)
    start = f"{ENDLESS.replace('start_seconds = 0', 'start_seconds = 9')}{FAST}step_ms = 0\n"
    (one,) = plan(tmp_path, start.replace("row_ms = 0", "row_ms = 1000"))["devices"]
    assert one["seconds"] == pytest.approx(12, rel=1e-3)
    assert one["limited_by"] == "start"


def test_logits_of_scored_texts_and_of_prompts_are_products(tmp_path: Path) -> None:
    machine = f"{ENDLESS}memory_gb_per_second = 1e15\nstep_ms = 0\ntflops = 1e-6\n"
    ids = list(range(5, 305))
    seconds = []
    plain = {"input_ids": ids, "max_new_tokens": 1, "ignore_eos": True}
    with_logprobs = {**plain, "return_logprob": True, "logprob_start_len": 0}
    for row in (plain, with_logprobs, {"input_ids": ids[:1], "completions": [ids[1:]]}):
        write_rows(tmp_path, [row])
        seconds.append(plan(tmp_path, machine)["devices"][0]["seconds"])
    assert seconds[1] > 1.05 * seconds[0]
    assert seconds[2] == pytest.approx(seconds[1], rel=0.05)


def test_devices_share_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(8, 64, first) for first in range(5, 37)])
    machine = f"{ENDLESS}{FAST}step_ms = 1000\nprice_per_hour = 1\n"
    figures = plan(tmp_path, machine, "--max-num-seqs", "8", devices="1,2,4,32,64")
    times = {each["devices"]: each["seconds"] for each in figures["devices"]}
    assert list(times) == [1, 2, 4, 32]  # no device without a prompt
    assert [round(times[count]) for count in (1, 2, 4, 32)] == [256, 128, 64, 64]
    assert figures["devices"][-1]["cost"] == pytest.approx(32 * 64 / 3600, rel=1e-2)


def test_unknown_lengths_widen_the_interval_until_they_are_said(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"text": f"Name {number}", "max_new_tokens": 400} for number in range(64)])
    machine = f"{ENDLESS}{FAST}step_ms = 1000\n"
    unknown, said = plan(tmp_path, machine), plan(tmp_path, machine, "--output-tokens", "50")
    assert (unknown["samples_of_unknown_length"], unknown["mean_output_tokens"]) == (64, None)
    assert said["mean_output_tokens"] == pytest.approx(50, rel=0.1)
    long = plan(tmp_path, machine, "--output-tokens", "300")  # of 400, which cut some off
    assert long["mean_output_tokens"] == pytest.approx(300, rel=0.1)
    wide, narrow = (each["devices"][0]["seconds_max"] / each["devices"][0]["seconds_min"] for each in (unknown, said))
    assert narrow < wide / 2


def test_a_run_measures_its_machine(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(30 + number, 40, number) for number in range(5, 45)] + [{"text": "a"}] * 20)
    run(["run", "rows.jsonl", "-o", "pilot.parquet", "--report", "pilot.json"], tmp_path)
    (one,) = plan(tmp_path, 'measured = "pilot.json"\nprice_per_hour = 1\n')["devices"]
    report = json.loads((tmp_path / "pilot.json").read_text())
    assert report["measured"]["lengths"]["finished"] == 20
    assert 0 < one["seconds_min"] < one["seconds"] < one["seconds_max"]
    direct = run(["plan", "rows.jsonl", "--machine", "pilot.json", "--json"], tmp_path)
    assert json.loads(direct.stdout)["devices"][0]["cost"] is None


def test_the_report_is_the_json(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(8, 4)])
    printed = plan(tmp_path, ENDLESS + FAST, "--report", "forecast.json")
    assert json.loads((tmp_path / "forecast.json").read_text()) == printed
    done = run(["plan", "rows.jsonl", "--machine", "box.toml", "--devices", "1", "--report", "-"], tmp_path)
    assert json.loads(done.stdout) == printed
    assert "limited by" in done.stderr


def test_the_table_for_a_reader(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(8, 4), {"text": 5}, {"text": 6}])
    (tmp_path / "box.toml").write_text('name = "a [b] box"\nmemory = "80GiB"\nprice_per_hour = 36000\n')
    command = ["plan", "rows.jsonl", "--machine", "box.toml"]
    done = run([*command, "--max-errors", "100%"], tmp_path)
    assert re.search("rows +3, errors 2", done.stdout)
    assert "a [b] box" in done.stdout
    assert "cost (USD)" in done.stdout
    assert not (tmp_path / "output.parquet").exists()
    run([*command, "--max-errors", "0"], tmp_path, expect=3)


@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        ("tflop = 3\n", (), "unknown key `tflop` (did you mean tflops?)"),
        ('device = "tpu"\n', (), 'has "tpu" as `device`, which must be cpu or cuda'),
        ("tflops = 3\n", (), "has no `memory`"),
        ('memory = "much"\n', (), "has a wrong `memory`"),
        ('memory = "1KB"\n', (), "the model's weights take"),
        ('memory = "1GB"\ntflops = -1\n', (), "has -1 as `tflops`, which must be above 0"),
        ('memory = "1GB"\ntflops = "3"\n', (), "has a string as `tflops`, which must be"),
        ('measured = "no.json"\n', (), "cannot read no.json"),
        ('measured = "other.json"\n', (), "has nothing as `measured`"),
        ('device = "cpu"\n', ("--device", "cuda"), "the machine file says cpu"),
        ('device = "cpu"\n', ("--tensor-parallel", "2"), "does not know the time of sums between devices"),
        (
            'device = "cpu"\n',
            ("--offload", "auto", "--device-memory", "6MiB"),
            "`--offload`: batchgen plan does not know the time of copies",
        ),
        ('device = "cpu"\n', ("--devices", "1,x"), "`--devices` must be numbers from 1 to 1,000"),
        ('device = "cpu"\n', ("--devices", "1001"), "`--devices` must be numbers from 1 to 1,000"),
    ],
)
def test_a_wrong_machine_is_refused_by_name(
    tmp_path: Path, machine: str, options: tuple[str, ...], message: str
) -> None:
    write_rows(tmp_path, [fixed(8, 4)])
    (tmp_path / "box.toml").write_text(machine)
    (tmp_path / "other.json").write_text("{}")
    done = run(["plan", "rows.jsonl", "--machine", "box.toml", *options], tmp_path, expect=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_is_planned_without_one(tmp_path: Path) -> None:
    write_rows(tmp_path, [fixed(8, 4)])
    figures = plan(tmp_path, 'memory = "80GiB"\n', "--model", str(model_path()))
    assert figures["devices"][0]["seconds"] > 20
