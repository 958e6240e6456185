"""A storage service in memory, with the life of an upload as the packages of real services have it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from batchgen.data.remote import service


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """Objects by path. What is closed is published, and so is what is collected without having been discarded."""

    cachable = False
    protocol = "s3"

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.before: Callable[[str, str], None] = lambda operation, path: None
        """Is called before each operation with its name and path, and may raise."""
        self.discarded: list[str] = []
        self.ranges: list[tuple[int, int]] = []

    def _etag(self, path: str) -> str:
        return f'"{hashlib.md5(self.objects[path]).hexdigest()}"'

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.before("info", path)
        if path in self.objects:
            return {"name": path, "type": "file", "size": len(self.objects[path]), "ETag": self._etag(path)}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.before("ls", path)
        below = path.rstrip("/") + "/"
        names = {below + name.removeprefix(below).split("/")[0] for name in self.objects if name.startswith(below)}
        if not names:
            raise FileNotFoundError(path)
        return [self.info(name) for name in sorted(names)] if detail else sorted(names)

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        self.before("read", path)
        self.ranges.append((start, end or 0))
        return self.objects[path][start:end]

    def rm_file(self, path: str) -> None:
        self.before("remove", path)
        self.objects.pop(path, None)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Upload:
        return Upload(self, path, mode, block_size=block_size, match=options.get("IfMatch"), cache_type="none")


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is being written."""

    def __init__(self, bucket: Bucket, path: str, mode: str, match: str | None, **options: Any) -> None:
        self.parts: list[bytes] = []
        self.match = match
        super().__init__(bucket, path, mode, **options)

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.before("part", self.path)
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.before("complete", self.path)
            exists = self.path in self.fs.objects
            if (exists and "x" in self.mode) or (
                self.match and not (exists and self.fs._etag(self.path) == self.match)
            ):
                raise FileExistsError("PreconditionFailed")
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.fs.discarded.append(self.path)


def use(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket in place of every service, whose failing requests are tried again at once."""
    bucket = Bucket()
    monkeypatch.setattr(service, "_file_system", lambda scheme: bucket)
    monkeypatch.setattr(service, "WAITS", (0.0,) * 3)
    return bucket
