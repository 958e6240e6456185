"""Jobs with images: shown, counted, checked, killed and resumed, reused and verified."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import load_file

from batchgen.data import feature_files
from tests.e2e.model import save_model
from tests.e2e.rows import rows_of, write_lines
from tests.e2e.runner import ProcessResult, parts_of, run, start
from tests.models.tiny_media import save_media

LLAVA = "<image>"
DEADLY = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from batchgen.data import feature_files
from batchgen.models.media.encoder import MediaEncoder

encode = MediaEncoder.encode

class AtOnce(ThreadPoolExecutor):
    def submit(self, *call):
        done = super().submit(*call)
        done.result()
        return done

def counted(self, items):
    with open("encoded", "a") as file:
        file.write("x" * len(items))
    return encode(self, items)

if "DEADLY" in os.environ:
    MediaEncoder.encode = counted
    feature_files.FILE_BYTES = 1  # each image has its own file
    feature_files.ThreadPoolExecutor = AtOnce  # so that features are written before the process ends

def deadly(logits, rows):
    if "DEADLY" in os.environ and any(row.params["dies"] == len(row.output_ids) for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)
    return logits
"""
"""A logit processor that ends the process, in a module that counts what the towers encode."""
PICTURES = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_media("llava", folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    rng = np.random.default_rng(3)
    for number in range(PICTURES):
        pixels = rng.integers(0, 255, (30 + 10 * number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    return tmp_path


def save_pictures(folder: Path, count: int) -> None:
    """Pictures of one size."""
    rng = np.random.default_rng(4)
    for number in range(count):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "pictures" / f"{number}.png")


def rows(count: int = 24, tokens: int = 6, pictures: int = PICTURES) -> list[dict[str, Any]]:
    common = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with_images = [
        {"id": f"r{i}", "text": f"see {LLAVA} and say {i}", "image_data": f"{i % pictures}.png", **common}
        for i in range(count)
    ]
    return [*with_images, {"id": "words", "text": "only words", **common}]


def command(model: Path, *options: object, verb: str = "run") -> list[object]:
    where = ["-o", "out.parquet"] if verb == "run" else []
    media = ["--media-root", "pictures", "--max-model-len", "256", "--max-num-seqs", "4"]
    return [verb, "in.jsonl", *where, "--model", model, *media, *options]


def counted(result: ProcessResult) -> dict[str, Any]:
    media: dict[str, Any] = result.report["media"]
    return media


@pytest.mark.field("image_data")
def test_a_run_counts_its_images_as_planned(folder: Path, model: Path) -> None:
    write_lines(folder / "in.jsonl", rows())
    report = run(command(model, "--json", verb="check"), folder)
    assert report.report["tower_bytes"] == sum(
        tensor.nbytes
        for name, tensor in load_file(model / "model.safetensors").items()
        if "vision_tower" in name or "multi_modal_projector" in name
    )
    checked = counted(report)
    done = run(command(model, "--report", "-", "--include-prompt-ids", "--include-prompt"), folder)
    media = counted(done)
    assert checked == {
        "items": PICTURES, "images": PICTURES, "sounds": 0, "megapixels": 0.013, "audio_seconds": 0.0,
        "encoded_tokens": 4 * PICTURES, "prompt_tokens": 4 * 24,
    }  # fmt: skip
    assert {name: media[name] for name in checked} == checked
    assert (media["encoded"], media["failed"]) == (PICTURES, 0)
    assert "6 distinct images (0.013 megapixels), 6 encoded to 24 tokens" in done.stderr
    *found, words = rows_of(folder / "out.parquet")
    assert {row["media_tokens"] for row in found} == {4}
    assert words["media_tokens"] is None
    assert found[0]["prompt"] == f"see {LLAVA * 4} and say 0"
    assert found[0]["prompt_ids"].count(257) == 4
    footer = json.loads(pq.read_metadata(folder / "out.parquet").metadata[b"batchgen.run"])
    assert footer["media"] == {**checked, "encoded": PICTURES, "reused": 0}
    run(["export", "out.parquet", "--format", "openai-batch", "-o", "lines.jsonl"], folder)
    usage = json.loads((folder / "lines.jsonl").read_text().splitlines()[0])["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["media_tokens"] == 4


def test_a_killed_job_ends_as_one_that_was_not_disturbed(folder: Path, model: Path) -> None:
    write_lines(folder / "in.jsonl", rows(24, 16))
    run(command(model), folder)
    undisturbed = rows_of(folder / "out.parquet")
    (folder / "out.parquet").unlink()
    job = start(command(model, "--commit-every", "3", "--commit-seconds", "0.01"), folder)
    job.wait_for(lambda: len(parts_of(folder / "out.parquet")) > 1)
    assert job.kill_after(0)
    again = run(command(model, "--report", "-"), folder)
    assert counted(again)["items"] == PICTURES
    assert again.report["rows_resumed"] > 0
    assert rows_of(folder / "out.parquet") == undisturbed


def killed(folder: Path, model: Path) -> list[object]:
    """Kill a job while its row 14 of 24, each with its own image, has two tokens; returns its command line."""
    (folder / "deadly_module.py").write_text(DEADLY)
    save_pictures(folder, 24)
    deadly = {"custom_logit_processor": "deadly", "max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    write_lines(
        folder / "in.jsonl",
        [
            {"text": f"{LLAVA} say {i}", "image_data": f"{i}.png", "custom_params": {"dies": 2 if i == 14 else -1}}
            | deadly
            for i in range(24)
        ],
    )
    line = command(model, "--logit-processor", "deadly=deadly_module:deadly", "--deterministic", "--commit-every", "2")
    died = start([*line, "--commit-seconds", "0.01"], folder, env={"DEADLY": "1"}).wait()
    assert died.code == -9, died.stderr
    return line


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "out.parquet.work" / "features").iterdir())


def undisturbed(line: list[object], folder: Path) -> list[dict[str, Any]]:
    run([*line, "-o", "undisturbed.parquet"], folder)
    return rows_of(folder / "undisturbed.parquet")


def test_a_killed_job_encodes_no_image_again(folder: Path, model: Path) -> None:
    line = killed(folder, model)
    before = len((folder / "encoded").read_text())
    assert 3 <= len(kept(folder)) < before, "those of committed rows are removed"
    again = run([*line, "--report", "-"], folder)
    media = counted(again)
    assert media["reused"] >= 3, "the rows that were running, of which one may not have been written"
    assert 24 - before <= media["encoded"] <= 25 - before
    assert media["encoded"] + media["reused"] == 24 - again.report["rows_resumed"]
    assert f"{media['encoded']} encoded and {media['reused']} reused, of 96 tokens" in again.stderr
    footer = json.loads(pq.read_metadata(folder / "out.parquet").metadata[b"batchgen.run"])["media"]
    assert (footer["encoded"], footer["reused"]) == (media["encoded"], media["reused"])
    assert not (folder / "out.parquet.work").exists()
    assert rows_of(folder / "out.parquet") == undisturbed(line, folder)


def test_features_outlive_a_mended_row_and_are_never_used_damaged(folder: Path, model: Path) -> None:
    line = killed(folder, model)
    whole = max(file.stat().st_size for file in kept(folder))
    file = [file for file in kept(folder) if file.stat().st_size == whole][-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    lines = (folder / "in.jsonl").read_text().splitlines()
    (folder / "in.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace("say", "tell")]))
    again = run([*line, "--resume-anyway", "--report", "-"], folder)
    media = counted(again)
    assert media["reused"] >= 2
    assert media["encoded"] + media["reused"] == 24 - again.report["rows_resumed"]
    assert 1 <= media["encoded"] - (24 - len((folder / "encoded").read_text())) <= 2, "the damaged one"
    assert rows_of(folder / "out.parquet") == undisturbed(line, folder)


def test_a_full_disk_keeps_no_features_and_ends_no_job(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_files, "LEFT_BYTES", 1 << 62)
    write_lines(folder / "in.jsonl", rows(3))
    done = run(command(model, "--report", "-"), folder)
    assert (counted(done)["encoded"], done.report["rows_ok"]) == (3, 4)
    assert "out.parquet.work/features (the disk is almost full): a run that continues this job" in done.stderr


def test_rows_are_reused_by_the_content_of_their_images(folder: Path, model: Path) -> None:
    """Another order numbers the images otherwise; a picture that has changed is computed again."""
    write_lines(folder / "in.jsonl", rows())
    run(command(model), folder)
    first = {row["id"]: row for row in rows_of(folder / "out.parquet")}
    write_lines(folder / "in.jsonl", rows()[::-1])
    Image.new("RGB", (40, 30), (200, 10, 60)).save(folder / "pictures" / "0.png")
    again = run([*command(model, "--reuse", "out.parquet", "--report", "-"), "-o", "other.parquet"], folder)
    assert counted(again)["encoded"] == 1
    assert "21 of 25 rows are reused, 4 are new" in again.stderr
    for row in rows_of(folder / "other.parquet"):
        changed = row["id"] in ("r0", "r6", "r12", "r18")
        assert (row["output_ids"] == first[row["id"]]["output_ids"]) != changed, row["id"]


def test_damaged_images_fail_their_rows_alone(folder: Path, model: Path) -> None:
    whole = (folder / "pictures" / "5.png").read_bytes()
    (folder / "pictures" / "cut.png").write_bytes(whole[: len(whole) // 2])
    bad = [
        {"id": "cut", "text": f"{LLAVA} a", "image_data": "cut.png"},
        {"id": "cut again", "text": f"{LLAVA} b", "image_data": "cut.png", "n": 2},
        {"id": "missing", "text": f"{LLAVA} a", "image_data": "none.png"},
        {"id": "two", "text": f"{LLAVA} a", "image_data": ["1.png", "2.png"]},
    ]
    write_lines(folder / "in.jsonl", [*rows(), *bad])
    result = run(command(model, "--report", "-"), folder)
    assert counted(result)["failed"] == 1
    assert result.report["errors"] == {"media_error": 4}
    found = {row["id"]: row for row in rows_of(folder / "out.parquet")}
    assert [found[row["id"]]["error"]["param"] for row in bad] == ["image_data"] * 4
    write_lines(folder / "in.jsonl", rows())
    run([*command(model), "-o", "good.parquet"], folder)
    for row in rows_of(folder / "good.parquet"):
        assert row["output_ids"] == found[row["id"]]["output_ids"]


class Pictures(ThreadingHTTPServer):
    """Serves the files of a folder, each after a while; knows what was asked for, and how much at once."""

    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        self.open = self.most = 0
        self.asked: list[str] = []
        self.lock = Lock()
        super().__init__(("127.0.0.1", 0), partial(Picture, directory=str(folder)))

    def __enter__(self) -> Self:
        self.thread = Thread(target=self.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Picture(SimpleHTTPRequestHandler):
    server: Pictures

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.open += 1
            self.server.asked.append(self.path)
            self.server.most = max(self.server.most, self.server.open)
        time.sleep(0.4 if self.path == "/0.png" else 0.05)  # the first one is slower than those behind it
        with self.server.lock:
            self.server.open -= 1
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


def test_urls_are_fetched_side_by_side_and_rows_stay_in_order(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    save_pictures(folder, 100)
    given = [{**row, "max_new_tokens": 2} for row in rows(100, pictures=100)]
    for index in (41, 42):
        given[index] = {**given[index], "image_data": "none.png"}
    given[50] = {"text": "no image", "max_new_tokens": 2, "temperature": 0}
    given[60] = {**given[60], "image_data": ["1.png", "2.png"], "text": f"{LLAVA} and {LLAVA}"}
    write_lines(folder / "in.jsonl", given)
    run(command(model), folder)
    from_files = rows_of(folder / "out.parquet")
    with Pictures(folder / "pictures") as server:
        prefix = f"http://127.0.0.1:{server.server_port}/"
        for row in given:
            names = row.get("image_data", [])
            if names:
                row["image_data"] = [prefix + name for name in ([names] if isinstance(names, str) else names)]
        given[70]["image_data"] = ["http://127.0.0.1:1/70.png"]
        write_lines(folder / "in.jsonl", given)
        run([*command(model, "--allow-media-url", prefix), "-o", "urls.parquet"], folder)
    assert 4 <= server.most <= 16
    assert sorted(server.asked) == sorted(f"/{n}.png" for n in (*range(100), "none") if n not in (41, 42, 50, 60, 70))
    found = rows_of(folder / "urls.parquet")
    for index in (41, 42):
        assert "HTTP 404" in found[index]["error"]["message"]
    assert "may not be fetched" in found[70]["error"]["message"]
    for index, (url, file) in enumerate(zip(found, from_files, strict=True)):
        assert index in (41, 42, 70) or (url["id"], url["output_ids"]) == (file["id"], file["output_ids"])


def test_a_named_column_of_a_table_is_used_and_an_unnamed_one_is_not_passed_over(folder: Path, model: Path) -> None:
    write_lines(folder / "in.jsonl", rows(3))
    run(command(model), folder)
    expected = [row["output_ids"] for row in rows_of(folder / "out.parquet")]
    table = rows(3)
    for row in table:
        if name := row.pop("image_data", None):
            row["picture"] = {"bytes": (folder / "pictures" / name).read_bytes(), "path": name}
    table[-1]["picture"] = None
    pq.write_table(pa.Table.from_pylist(table), folder / "in.parquet")
    words = [*command(model)[4:], "--max-num-seqs", "4"]
    run(["run", "in.parquet", "-o", "named.parquet", *words, "--image-column", "picture"], folder)
    named = rows_of(folder / "named.parquet")
    assert [row["output_ids"] for row in named] == expected
    assert {row["extra"] for row in named} == {None}
    run(["verify", "named.parquet", "--rows", "2"], folder)
    hint = "`picture` in 3 rows: an image or a sound: give it as `image_data` or `audio_data`, or name it with --image-"
    assert hint in run(["check", "in.parquet", *words], folder).stdout
    assert run(["run", "in.parquet", "-o", "unnamed.parquet", *words], folder).stderr.count(hint) == 1
    wrong = run(["run", "in.parquet", "-o", "x.parquet", *words, "--image-column", "pictures"], folder, expect=2).stderr
    assert "has no column 'pictures'" in wrong
    assert "did you mean `picture`? Correct --image-column" in wrong


def test_verify_replays_rows_with_images(folder: Path, model: Path) -> None:
    write_lines(folder / "in.jsonl", rows(8))
    run(command(model, "--deterministic"), folder)
    run(["verify", "out.parquet", "--rows", "5"], folder)


def test_events_of_rows_with_images(folder: Path, model: Path) -> None:
    write_lines(folder / "in.jsonl", [{**row, "stream": True} for row in rows(3)])
    run(command(model, "--events", "events.jsonl"), folder)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {event["id"] for event in events} == {"r0", "r1", "r2", "words"}


def test_a_missing_library_ends_the_run(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the rows' fault, so none of them has an error."""
    write_lines(folder / "in.jsonl", rows(1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    ended = run(command(model), folder, expect=2)
    assert "need the library Pillow; pip install 'batchgen[media]'" in ended.stderr
    assert not (folder / "out.parquet").exists()


def test_a_model_without_towers_says_so(folder: Path) -> None:
    write_lines(folder / "in.jsonl", rows(1))
    run(command(save_model(folder / "text model")), folder)
    refused, words = rows_of(folder / "out.parquet")
    assert refused["error"]["code"] == "unsupported_field"
    assert "`image_data` cannot be given to this model" in refused["error"]["message"]
    assert words["status"] == "ok"
    write_lines(folder / "in.jsonl", [{"text": "a", "picture": "0.png"}, {"text": "a"}])
    run(command(folder / "text model", "--image-column", "picture", "--overwrite"), folder)
    refused, words = rows_of(folder / "out.parquet")
    assert refused["error"]["param"] == "picture"
    assert "`picture` cannot be given to this model" in refused["error"]["message"]
    assert words["status"] == "ok"
