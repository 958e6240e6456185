"""Data at URLs, against a real S3 server, with kills and injected faults, and against a server at https://."""

from __future__ import annotations

import base64
import gzip
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchgen.data.files import abort_uploads
from batchgen.data.remote import service
from tests.e2e.rows import assert_same, mixed_lines, read, write_lines
from tests.e2e.runner import ProcessResult, batchgen, interrupt, run, start
from tests.e2e.servers import Answer, Proxy, gs_server, https_server, hub, s3_error, s3_server

pytestmark = pytest.mark.slow
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

RUN_ONLY = ("cached_tokens",)
"""Columns that depend on how far a run had come when it was stopped."""
NAMES = ("error",)
"""Columns that name the input."""


def codes(table: pa.Table) -> list[str | None]:
    return [error and error["code"] for error in table["error"].to_pylist()]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3_server(tmp_path_factory.mktemp("moto") / "log") as port:
        yield port


@pytest.fixture
def proxy(s3: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with Proxy(s3).running() as proxy:
        for name, value in proxy.env.items():
            monkeypatch.setenv(name, value)
        service._file_system.cache_clear()
        service._file_system("s3").mkdir(BUCKET, acl=None) if not service._file_system("s3").exists(BUCKET) else None
        yield proxy
        service._file_system.cache_clear()


BUCKET = "data-of-tests"
numbers = iter(range(1000))


@pytest.fixture
def at(proxy: Proxy) -> str:
    """A prefix of the bucket that nothing is below."""
    return f"s3://{BUCKET}/{next(numbers)}"


def put(url: str, data: bytes) -> None:
    service._file_system("s3").pipe_file(url.removeprefix("s3://"), data)


def get(url: str) -> bytes | None:
    files = service._file_system("s3")
    files.invalidate_cache()
    path = url.removeprefix("s3://")
    return bytes(files.cat_file(path)) if files.exists(path) else None


def uploads() -> list[str]:
    """Keys of uploads that were begun, and neither completed nor aborted."""
    found = service._file_system("s3").call_s3("list_multipart_uploads", Bucket=BUCKET)
    return [each["Key"] for each in found.get("Uploads", [])]


@pytest.fixture
def command(model: Path) -> list[Any]:
    return ["run", "--model", model, "--dtype", "float32", "--report", "-", "--progress", "none"]


def blob_lines(count: int = 200, size: int = 70_000) -> list[bytes | dict[str, Any]]:
    """Rows whose results take more than one part of an upload: they carry bytes that do not compress."""
    random = Random(5)
    return [
        {
            "id": str(i),
            "text": f"Say {i % 9}",
            "max_new_tokens": 2,
            "b": base64.b64encode(random.randbytes(size)).decode(),
        }
        for i in range(count)
    ]


def test_rows_are_those_of_local_data(command: list[Any], at: str, tmp_path: Path) -> None:
    lines = mixed_lines(40)
    data = write_lines(tmp_path / "in.jsonl", lines).read_bytes()
    run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
    expected = read(tmp_path / "local.parquet")
    for name, content in (
        ("in.jsonl", data),
        ("in.jsonl.gz", gzip.compress(data)),
        ("in.jsonl.zst", zstandard.compress(data)),
    ):
        put(f"{at}/{name}", content)
        done = run([*command, f"{at}/{name}", "-o", f"{at}/{name}.parquet"], tmp_path)
        assert done.report["output"] == f"{at}/{name}.parquet"
        (tmp_path / "copy.parquet").write_bytes(get(f"{at}/{name}.parquet") or b"")
        found = read(tmp_path / "copy.parquet")
        assert_same(found, expected, ignore=NAMES)
        assert codes(found) == codes(expected) != [None] * len(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.parquet", "in.jsonl", "local.parquet"]
    assert run([*command, f"{at}/in.jsonl", "-o", f"{at}/in.jsonl.parquet"], tmp_path).report["already_done"]
    assert run([*command, f"{at}/in.jsonl", "-o", "here.parquet"], tmp_path).code == 0
    assert_same(read(tmp_path / "here.parquet"), expected, ignore=NAMES)
    footer = json.loads(pq.read_metadata(tmp_path / "here.parquet").metadata[b"batchgen.run"])
    assert footer["inputs"][0].keys() == {"path", "size", "etag"}


def test_folders_globs_and_partitions_of_parquet(command: list[Any], at: str, tmp_path: Path) -> None:
    tables = {
        f"lang={lang}/part-{i}.parquet": [f"{lang} {i} {j}" for j in range(30)] for lang in "ab" for i in range(2)
    }
    for name, texts in tables.items():
        path = tmp_path / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Row groups and a column that is not read: only parts of the file are asked for.
        pq.write_table(pa.table({"text": texts, "max_new_tokens": [2] * 30}), path, row_group_size=7)
        put(f"{at}/in/{name}", path.read_bytes())
    put(f"{at}/in/_SUCCESS", b"")
    put(f"{at}/in/README.md", b"# Data")
    run([*command, "local", "-o", "local.parquet", "--carry", "lang"], tmp_path)
    expected = read(tmp_path / "local.parquet")
    assert {*expected["lang"].to_pylist()} == {"a", "b"}
    for number, name in enumerate(
        (f"{at}/in", f"{at}/in/", f"{at}/in/**/*.parquet", f"{at}/in/lang=?/part-[01].parquet")
    ):
        run([*command, name, "-o", f"{number}.parquet", "--carry", "lang"], tmp_path)
        assert_same(read(tmp_path / f"{number}.parquet"), expected)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_kill_while_the_result_is_uploaded_loses_nothing(
    command: list[Any], proxy: Proxy, at: str, tmp_path: Path, suffix: str
) -> None:
    write_lines(tmp_path / "in.jsonl", blob_lines())
    words = [*command, "in.jsonl", "-o", f"{at}/out.{suffix}"]
    reached, go_on = threading.Event(), threading.Event()

    def stall(method: str, path: str) -> Answer | None:
        if method == "PUT" and "partNumber=2" in path:
            reached.set()
            go_on.wait(60)
        return None

    proxy.rule = stall
    job = start(words, tmp_path, env=proxy.env)
    job.wait_for(reached.is_set)
    assert job.kill_after(0)
    proxy.rule = lambda method, path: None
    go_on.set()
    assert get(f"{at}/out.{suffix}") is None
    assert len(uploads()) == 1
    done = run(words, tmp_path)
    assert (done.report["rows_resumed"], done.report["computed_prompt_tokens"], done.report["rows_ok"]) == (200, 0, 200)
    assert uploads() == []
    assert not list(tmp_path.glob("out*"))
    run([*command, "in.jsonl", "-o", f"local.{suffix}"], tmp_path)
    (tmp_path / f"copy.{suffix}").write_bytes(get(f"{at}/out.{suffix}") or b"")
    if suffix == "parquet":
        assert_same(read(tmp_path / "copy.parquet"), read(tmp_path / "local.parquet"), ignore=RUN_ONLY)
    else:
        copy, local = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("copy", "local"))
        texts = [[json.loads(line)["text"] for line in lines] for lines in (copy, local)]
        assert texts[0] == texts[1]


def test_a_run_that_is_stopped_goes_on(command: list[Any], at: str, tmp_path: Path) -> None:
    put(f"{at}/in.jsonl", write_lines(tmp_path / "in.jsonl", mixed_lines(60)).read_bytes())
    (tmp_path / "scratch").mkdir()
    words = [*command, f"{at}/in.jsonl", "-o", f"{at}/out.parquet", "--work-dir", "scratch"]
    interrupt(words, tmp_path, "scratch/out.parquet")
    assert get(f"{at}/out.parquet") is None
    assert "ok" in run(["show", "scratch/out.parquet.work"], tmp_path).stdout
    assert run(words, tmp_path).report["rows_resumed"] > 0
    run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
    (tmp_path / "copy.parquet").write_bytes(get(f"{at}/out.parquet") or b"")
    assert_same(read(tmp_path / "copy.parquet"), read(tmp_path / "local.parquet"), ignore=(*RUN_ONLY, *NAMES))
    assert not any((tmp_path / "scratch").iterdir())


def test_requests_that_fail_in_passing_are_tried_again(
    command: list[Any], proxy: Proxy, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WAITS", (0.01,) * 5)
    put(f"{at}/in.jsonl", write_lines(tmp_path / "in.jsonl", blob_lines()).read_bytes())
    failed: dict[str, int] = {}

    def busy(method: str, path: str) -> Answer | None:
        key = f"{method} {path.partition('?')[0]} {'partNumber' in path}"
        failed[key] = failed.get(key, 0) + 1
        return s3_error(503, "SlowDown") if failed[key] <= 2 else None

    proxy.rule = busy
    report = run([*command, f"{at}/in.jsonl", "-o", f"{at}/out.parquet"], tmp_path).report
    assert report["rows_ok"] == 200
    assert len([key for key, count in failed.items() if count > 2]) > 4
    proxy.rule = lambda method, path: None
    run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
    (tmp_path / "copy.parquet").write_bytes(get(f"{at}/out.parquet") or b"")
    assert_same(read(tmp_path / "copy.parquet"), read(tmp_path / "local.parquet"))
    assert uploads() == []


def one_error(result: ProcessResult, *words: str) -> None:
    """Check that a command printed one error with these words, and no traceback."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word in errors[0]
    assert "Traceback" not in result.stderr


def test_inputs_that_cannot_be_read(command: list[Any], proxy: Proxy, at: str, tmp_path: Path) -> None:
    put(f"{at}/in.jsonl", write_lines(tmp_path / "in.jsonl", mixed_lines(5)).read_bytes())
    words = partial(run, folder=tmp_path, expect=4)
    one_error(words([*command, f"{at}/none.jsonl", "-o", "o.parquet"]), f"{at}/none.jsonl", "no such file", "name")
    one_error(words([*command, "s3://no-such-bucket-at-all/a.jsonl", "-o", "o.parquet"]), "no such", "check the name")
    one_error(words([*command, f"{at}/none*.jsonl", "-o", "o.parquet"]), "no file matches")

    def expired(method: str, path: str) -> Answer | None:
        return (400, b"") if method == "HEAD" else s3_error(400, "ExpiredToken")

    proxy.rule = expired
    one_error(words([*command, f"{at}/in.jsonl", "-o", "o.parquet"]), "in.jsonl", "credentials have expired", "renew")
    proxy.rule = lambda method, path: (403, b"") if method == "HEAD" else s3_error(403, "AccessDenied")
    one_error(words([*command, f"{at}/in.jsonl", "-o", "o.parquet"]), "in.jsonl", "no access", "credentials")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_network_error_makes_no_error_rows(
    command: list[Any], proxy: Proxy, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input that breaks off is not a damaged one: the run ends, and rows are not lost."""
    monkeypatch.setattr(service, "WAITS", ())
    random = Random(1)
    texts = [base64.b64encode(random.randbytes(150)).decode() for _ in range(6000)]
    pq.write_table(
        pa.table({"text": texts, "max_new_tokens": [1] * 6000}), tmp_path / "in.parquet", row_group_size=1000
    )
    put(f"{at}/in.parquet", (tmp_path / "in.parquet").read_bytes())
    gets = iter(range(1000))
    proxy.rule = lambda method, path: s3_error(403, "ExpiredToken") if method == "GET" and next(gets) > 4 else None
    one_error(run([*command, f"{at}/in.parquet", "-o", "o.parquet"], tmp_path, expect=4), "credentials have expired")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (s3_error(400, "ExpiredToken"), ("credentials have expired", "renew")),
        (s3_error(403, "QuotaExceeded"), ("full", "Free some space", "committed rows are kept")),
        (s3_error(507, "XMinioStorageFull"), ("full", "Free some space")),
        (s3_error(403, "AccessDenied"), ("no access", "credentials")),
    ],
    ids=["expired", "quota", "full", "denied"],
)
def test_a_result_that_cannot_be_uploaded_is_kept(
    command: list[Any], proxy: Proxy, at: str, tmp_path: Path, answer: Answer, words: tuple[str, ...]
) -> None:
    write_lines(tmp_path / "in.jsonl", blob_lines(150))
    job = [*command, "in.jsonl", "-o", f"{at}/out.parquet"]
    proxy.rule = lambda method, path: answer if method == "PUT" and "partNumber=2" in path else None
    one_error(run(job, tmp_path, expect=5), f"{at}/out.parquet cannot be written", *words)
    proxy.rule = lambda method, path: None
    assert get(f"{at}/out.parquet") is None
    assert uploads() == [], "aborted by name"
    report = run(job, tmp_path).report
    assert (report["rows_resumed"], report["computed_prompt_tokens"]) == (150, 0)


def test_objects_of_others_are_never_replaced(command: list[Any], proxy: Proxy, at: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", mixed_lines(6))
    job = [*command, "in.jsonl", "-o", f"{at}/out.parquet"]
    put(f"{at}/out.parquet", b"not of batchgen")
    one_error(run(job, tmp_path, expect=2), f"{at}/out.parquet", "not this job's output", "--overwrite")
    assert get(f"{at}/out.parquet") == b"not of batchgen"
    assert run([*job, "--overwrite"], tmp_path).report["rows"] == 6
    assert run(job, tmp_path).report["already_done"]
    write_lines(tmp_path / "in.jsonl", mixed_lines(7))
    one_error(run(job, tmp_path, expect=2), "not this job's output", "can be reused")
    assert run([*job, "--resume-anyway"], tmp_path).report["rows_resumed"] > 0
    before = get(f"{at}/out.parquet")

    def meanwhile(url: str, written: bytes) -> None:
        """Another program writes the object while the run uploads its own."""

        def rule(method: str, path: str) -> Answer | None:
            if method == "PUT" and path.partition("?")[0].endswith("parquet"):
                proxy.rule = lambda method, path: None
                put(url, written)
            return None

        proxy.rule = rule

    meanwhile(f"{at}/out.parquet", b"written meanwhile")
    one_error(run([*job, "--overwrite"], tmp_path, expect=5), "another program has written it meanwhile")
    assert get(f"{at}/out.parquet") == b"written meanwhile" != before
    meanwhile(f"{at}/new.parquet", b"written meanwhile, too")
    new = [*command, "in.jsonl", "-o", f"{at}/new.parquet"]
    one_error(run(new, tmp_path, expect=5), "another program has written it meanwhile")
    assert get(f"{at}/new.parquet") == b"written meanwhile, too"
    service._file_system("s3").rm_file(f"{at}/new.parquet")
    assert run(new, tmp_path).report["computed_prompt_tokens"] == 0, "the rows were kept"


def test_results_at_urls_are_read_by_every_command(command: list[Any], at: str, tmp_path: Path) -> None:
    rows = [{"id": str(i), "text": f"Say {i}", "max_new_tokens": 3, "return_hidden_states": i == 2} for i in range(9)]
    put(f"{at}/in.jsonl", write_lines(tmp_path / "in.jsonl", [*rows, {"id": "bad"}]).read_bytes())
    for shard in range(3):
        run([*command, f"{at}/in.jsonl", "-o", f"{at}/shards", "--shard", f"{shard}/3"], tmp_path)
    run([*command, f"{at}/in.jsonl", "-o", f"{at}/out.parquet"], tmp_path)
    run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
    assert not list(tmp_path.glob("*.work"))
    for words in (["show"], ["show", "--errors"], ["show", "--row", "3"]):
        names = ("local.parquet", f"{at}/out.parquet", f"{at}/shards")
        shown = [sorted(run([*words, name], tmp_path).stdout.splitlines()) for name in names]
        local, *others = [[line for line in lines if "missing_prompt" not in line] for lines in shown]
        assert others == [local, local]
        assert len({len(lines) for lines in shown}) == 1
    run(["merge", f"{at}/shards", "-o", "merged.parquet"], tmp_path)
    assert_same(read(tmp_path / "merged.parquet"), read(tmp_path / "local.parquet"), ignore=(*RUN_ONLY, *NAMES))
    merged, local = (pq.read_table(tmp_path / f"{name}.hidden.parquet") for name in ("merged", "local"))
    np.testing.assert_allclose(*(table["values"].to_numpy()[0] for table in (merged, local)), atol=1e-4)
    run(["export", f"{at}/out.parquet", "--format", "jsonl", "-o", "lines.jsonl"], tmp_path)
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 10
    assert "intact" in run(["verify", f"{at}/out.parquet", "--file"], tmp_path).stdout
    assert run(["verify", f"{at}/out.parquet", "--rows", "3"], tmp_path).code == 0
    reused = run(
        [*command, f"{at}/in.jsonl", "--limit", "8", "-o", "some.parquet", "--reuse", f"{at}/out.parquet"], tmp_path
    )
    assert reused.report["rows_resumed"] == 8
    retried = run([*command, f"{at}/in.jsonl", "-o", f"{at}/out.parquet", "--retry-errors"], tmp_path)
    assert (retried.report["rows_ok"], retried.report["rows_error"]) == (9, 1)


def test_what_a_killed_upload_has_left_is_aborted_by_name(proxy: Proxy, at: str, tmp_path: Path) -> None:
    """An upload of another program to the same name stays."""
    key = f"{at}/a.bin".removeprefix(f"s3://{BUCKET}/")
    files = service._file_system("s3")
    mine, other = (files.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)["UploadId"] for _ in range(2))
    (tmp_path / "a.bin.upload").write_text(json.dumps({"url": f"{at}/a.bin", "upload": mine}))
    abort_uploads(tmp_path)
    left = files.call_s3("list_multipart_uploads", Bucket=BUCKET)["Uploads"]
    assert [each["UploadId"] for each in left] == [other]
    files.abort_mpu(BUCKET, key, other)


class TestHttps:
    ROWS = mixed_lines(30)

    @pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole"])
    def test_rows_are_those_of_local_data(self, command: list[Any], tmp_path: Path, ranges: bool) -> None:
        data = write_lines(tmp_path / "in.jsonl", self.ROWS).read_bytes()
        files = {"/a/in.jsonl": data, "/a/in.jsonl.gz": gzip.compress(data)}
        run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
        with https_server(files, tmp_path, ranges=ranges) as (address, certificate, seen):
            env = {"SSL_CERT_FILE": str(certificate)}
            for name in ("in.jsonl", "in.jsonl.gz"):
                job = [*command, f"{address}/a/{name}?signature=secret", "-o", f"{name}.parquet", "--include-source"]
                result = start(job, tmp_path, env=env).wait()
                assert result.code == 0, result.stderr
                assert "secret" not in result.stderr + result.stdout
                found = read(tmp_path / f"{name}.parquet")
                assert b"secret" not in (tmp_path / f"{name}.parquet").read_bytes()
                assert_same(found, read(tmp_path / "local.parquet"), ignore=("extra", *NAMES))
            assert any("bytes=" in request for request in seen) == ranges

    def test_errors(self, command: list[Any], tmp_path: Path) -> None:
        with https_server({"/in.jsonl": b"{}"}, tmp_path) as (address, certificate, _):
            job = [*command, "-o", "out.parquet"]
            untrusted = start([*job, f"{address}/in.jsonl?key=secret"], tmp_path).wait()
            one_error(untrusted, f"{address}/in.jsonl cannot be read", "certificate is not trusted", "SSL_CERT_FILE")
            missing = start([*job, f"{address}/none.jsonl"], tmp_path, env={"SSL_CERT_FILE": str(certificate)}).wait()
            one_error(missing, "none.jsonl cannot be read (there is no such file; check the name)")
            assert (untrusted.code, missing.code) == (4, 4)
            assert "secret" not in untrusted.stderr


def test_a_dataset_of_a_hub(command: list[Any], tmp_path: Path) -> None:
    """A stand-in answers the requests of the hub's package."""
    data = [write_lines(tmp_path / f"{i}.jsonl", mixed_lines(12, seed=i)).read_bytes() for i in range(2)]
    files = {"README.md": b"#", "data/train-0.jsonl": data[0], "data/train-1.jsonl": data[1], "other/x.csv": b"text"}
    run([*command, "0.jsonl", "1.jsonl", "-o", "local.parquet"], tmp_path)
    with hub(files) as (env, seen):
        for number, name in enumerate(("data", "data/*.jsonl", "data/train-?.jsonl")):
            job = [*command, f"hf://datasets/user/name/{name}", "-o", f"{number}.parquet"]
            done = batchgen(job, tmp_path, env={**os.environ, **env})
            assert done.returncode == 0, done.stderr
            found = read(tmp_path / f"{number}.parquet")
            assert_same(found, read(tmp_path / "local.parquet"), ignore=(*NAMES, *RUN_ONLY))
        missing = batchgen(
            [*command, "hf://datasets/user/name/none.csv", "-o", "x.parquet"], tmp_path, env={**os.environ, **env}
        )
        assert "hf://datasets/user/name/none.csv cannot be read (there is no such file" in missing.stderr
    assert any("/resolve/" in path for path in seen)
    offline = batchgen(
        [*command, "hf://datasets/user/name/data", "-o", "x.parquet"],
        tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert "HF_HUB_OFFLINE forbids it; unset it" in offline.stderr


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_bucket_of_google(
    command: list[Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    data = write_lines(tmp_path / "in.jsonl", blob_lines()).read_bytes()
    run([*command, "in.jsonl", "-o", "local.parquet"], tmp_path)
    with gs_server(tmp_path_factory.mktemp("gs") / "log", BUCKET) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        service._file_system.cache_clear()
        files = service._file_system("gs")
        for name in ("a", "b"):
            files.pipe_file(f"{BUCKET}/in/{name}.jsonl", data if name == "a" else b"")
        job = [*command, f"gs://{BUCKET}/in", "-o", f"gs://{BUCKET}/out.parquet"]
        assert run(job, tmp_path).report["rows_ok"] == 200
        (tmp_path / "copy.parquet").write_bytes(files.cat_file(f"{BUCKET}/out.parquet"))
        assert_same(read(tmp_path / "copy.parquet"), read(tmp_path / "local.parquet"))
        assert run(job, tmp_path).report["already_done"]
        one_error(run([*job, "--limit", "5"], tmp_path, expect=2), "not this job's output")
        assert run([*job, "--limit", "5", "--overwrite"], tmp_path).report["rows"] == 5
        one_error(run([*command, f"gs://{BUCKET}/none.jsonl", "-o", "x.parquet"], tmp_path, expect=4), "no such file")
    service._file_system.cache_clear()
