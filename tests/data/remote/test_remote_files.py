"""Reading by ranges, uploads and their conditions, and the errors of services in plain words."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchgen.config.urls import RemotePath
from batchgen.data import files
from batchgen.data.remote import files as remote_files
from batchgen.data.remote import service
from batchgen.data.remote.files import open_url
from tests.data.remote.bucket import Bucket, use

URL = RemotePath("s3://b/folder/a.bin")
KEY = "b/folder/a.bin"
SIZE = (3 << 20) + 500
"""Four parts."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr(remote_files, "_PART", 1 << 20)
    bucket = use(monkeypatch)
    files.note_version(URL)
    return bucket


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(Random(1).randbytes(SIZE))
    return path


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_003])
def test_a_reader_gives_the_bytes_of_the_file(bucket: Bucket, size: int) -> None:
    random = Random(size)
    data = bucket.objects[KEY] = random.randbytes(size)
    with open_url(str(URL), size) as stream:
        assert stream.read() == data
        assert stream.seek(0, 2) == size
        for _ in range(60):
            at, count = random.randint(0, size + 5), random.choice([1, 7, 4096, 200_000])
            stream.seek(at)
            assert stream.read(count) == data[at : at + count]


def test_a_reader_asks_for_more_as_it_reads_on(bucket: Bucket) -> None:
    data = bucket.objects[KEY] = bytes(40 << 20)
    with open_url(str(URL), len(data)) as stream:
        while stream.read(1 << 15):
            pass
        asked = [end - start for start, end in bucket.ranges]
        assert len(asked) < 12
        assert max(asked) == 1 << 24
        stream.seek(12345)
        stream.read(10)
        assert bucket.ranges[-1] == (12345, 12345 + max(1 << 16, 1 << 17)), "little where it has moved to"


def test_a_file_that_becomes_shorter_is_an_error(bucket: Bucket) -> None:
    bucket.objects[KEY] = b"short"
    with open_url(str(URL), 100) as stream, pytest.raises(OSError, match="5 bytes were read where 100 are"):
        stream.read()


def test_requests_are_tried_again(bucket: Bucket) -> None:
    bucket.objects[KEY] = b"content"
    tries = iter(range(10))

    def fail(operation: str, path: str) -> None:
        if next(tries) < 3:
            raise TimeoutError("slow")

    bucket.before = fail
    assert service.state_of(str(URL)).size == 7
    tries = iter(range(10))
    bucket.before = lambda operation, path: (_ for _ in ()).throw(ConnectionResetError("gone"))
    with pytest.raises(OSError, match="the network or the service failed: ConnectionResetError: gone") as caught:
        service.state_of(str(URL))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(URL))


class Refused(Exception):
    """An error as the packages of services raise it."""

    def __init__(self, text: str, status: int | None = None, body: Any = None) -> None:
        super().__init__(text)
        self.status = status
        if body is not None:
            self.response = body


CASES = [
    (FileNotFoundError(KEY), errno.ENOENT, "no such file"),
    (PermissionError("Forbidden"), errno.EACCES, "no access"),
    (Refused("x", 403), errno.EACCES, "no access"),
    (Refused("x", body={"ResponseMetadata": {"HTTPStatusCode": 404}}), errno.ENOENT, "no such file"),
    (Refused("An error occurred (ExpiredToken)", 400), errno.EACCES, "credentials have expired; renew"),
    (Refused("(QuotaExceeded) quota of the bucket", 403), errno.ENOSPC, "storage is full"),
    (Refused("XMinioStorageFull", 507), errno.ENOSPC, "storage is full"),
    (Refused("(PreconditionFailed)", 412), errno.EEXIST, "written it meanwhile"),
    (Refused("certificate verify failed: self signed"), errno.EACCES, "certificate is not trusted"),
    (Refused("Unable to locate credentials"), errno.EACCES, "no credentials were found"),
    (Refused("offline mode is enabled"), errno.EACCES, "HF_HUB_OFFLINE"),
    (Refused("bad name", 400), errno.EINVAL, "the service refused it: Refused: bad name"),
    (Refused("quota of requests a minute exceeded", 429), errno.EIO, "the network or the service failed"),
    (Refused("busy", 503), errno.EIO, "the network or the service failed"),
]


@pytest.mark.parametrize(("error", "number", "words"), CASES, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_errors_in_plain_words(bucket: Bucket, error: Exception, number: int, words: str, wrapped: bool) -> None:
    def fail(operation: str, path: str) -> None:
        if wrapped:
            raise OSError(22, "Bad Request") from error
        raise error

    bucket.before = fail
    if wrapped and error in [case[0] for case in CASES[:2]]:
        return  # the packages raise these as they are
    with pytest.raises(OSError, match=words) as caught:
        service.state_of(str(URL))
    assert caught.value.errno == number


def test_names_of_files_are_not_errors(bucket: Bucket) -> None:
    """And a query, which may be a signature, is in no message."""
    bucket.before = lambda operation, path: (_ for _ in ()).throw(FileNotFoundError(path))
    for name in ("s3://b/quota expired.jsonl", "s3://expired/credential", "s3://b/e"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            service.state_of(name)
    bucket.before = lambda operation, path: (_ for _ in ()).throw(ConnectionError(f"no answer of {path}"))
    with pytest.raises(OSError, match="failed") as caught:
        service.state_of("https://host/a.jsonl?signature=secret")
    assert caught.value.filename == "https://host/a.jsonl"
    assert "secret" not in str(caught.value)


def test_an_upload_becomes_visible_at_its_end(bucket: Bucket, source: Path) -> None:
    data = source.read_bytes()
    seen: list[tuple[str, bool]] = []
    bucket.before = lambda operation, path: seen.append((operation, path in bucket.objects))
    files.rename(source, URL)
    assert bucket.objects == {KEY: data}
    assert [there for operation, there in seen if operation in ("part", "complete")] == [False] * 5
    assert not source.exists()
    assert (files.size_of(URL), files.is_file(URL), files.is_folder(URL.parent)) == (SIZE, True, True)
    assert files.files_in(URL.parent, "*.bin") == [URL]
    with files.open_named(URL) as stream:
        assert stream.read() == data
    files.remove_file(URL)
    files.remove_file(URL)
    assert not bucket.objects


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "QuotaExceeded"), TimeoutError("slow")])
@pytest.mark.parametrize("at", range(4))
def test_an_upload_that_fails_is_aborted(bucket: Bucket, source: Path, error: BaseException, at: int) -> None:
    parts = iter(range(9))

    def fail(operation: str, path: str) -> None:
        if operation in ("part", "complete") and next(parts) == at:
            raise error

    bucket.before, data = fail, source.read_bytes()
    if isinstance(error, TimeoutError):
        files.rename(source, URL)  # another try
        assert (bucket.objects, bucket.discarded) == ({KEY: data}, [KEY])
        return
    with pytest.raises((OSError, KeyboardInterrupt)) as caught:
        files.rename(source, URL)
    del caught
    if at == 1 and isinstance(error, KeyboardInterrupt):
        gc.collect()  # an upload that is collected must not be published
    assert not bucket.objects
    assert bucket.discarded == [KEY]
    assert source.exists()


def test_only_the_version_that_was_noted_is_replaced(bucket: Bucket, source: Path) -> None:
    data = source.read_bytes()
    files.note_version(URL)
    bucket.objects[KEY] = b"of another program"
    with pytest.raises(FileExistsError, match="written it meanwhile"):
        files.rename(source, URL)
    files.note_version(URL)
    bucket.before = lambda operation, path: bucket.objects.update({KEY: b"late"}) if operation == "complete" else None
    with pytest.raises(FileExistsError, match="written it meanwhile"):
        files.rename(source, URL)
    assert bucket.objects == {KEY: b"late"}
    bucket.before = lambda operation, path: None
    files.note_version(URL)
    files.rename(source, URL)
    assert bucket.objects == {KEY: data}


def test_an_upload_whose_answer_was_lost_has_happened(bucket: Bucket, source: Path) -> None:
    data = source.read_bytes()
    lost = iter(range(9))

    def fail(operation: str, path: str) -> None:
        if operation == "complete" and next(lost) == 0:
            bucket.objects[KEY] = data
            raise TimeoutError("no answer")

    bucket.before = fail
    files.rename(source, URL)
    assert bucket.objects == {KEY: data}


def test_a_service_without_conditions(bucket: Bucket, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = source.read_bytes(), bucket._open

    def plain(path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "xb" or "IfMatch" in options:
            raise Refused("A header you provided implies functionality that is not implemented", 501)
        return made(path, mode, **options)

    monkeypatch.setattr(bucket, "_open", plain)
    files.rename(source, URL)
    source.write_bytes(b"more")
    files.note_version(URL)
    files.rename(source, URL)
    assert bucket.objects == {KEY: b"more"} != {KEY: data}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", missing)
    service._file_system.cache_clear()
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("https", "aiohttp")):
        with pytest.raises(service.UsageError, match=rf"pip install 'batchgen\[remote\]', or pip install {package}$"):
            service.state_of(f"{scheme}://host/a")
    service._file_system.cache_clear()


def test_a_file_moves_to_another_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, real = source.read_bytes(), files.FileSystem.rename

    def other_disk(system: files.FileSystem, old: Path, new: Path) -> None:
        if old.parent != new.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(system, old, new)

    monkeypatch.setattr(files.FileSystem, "rename", other_disk)
    (tmp_path / "there").mkdir()
    files.rename(source, tmp_path / "there" / "b.bin")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.bin")] == [Path("there/b.bin")]
    assert (tmp_path / "there" / "b.bin").read_bytes() == data
