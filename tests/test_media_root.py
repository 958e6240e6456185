"""Rows name files under --media-root, and none elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.media_root import MediaRoot


@pytest.fixture
def world(tmp_path: Path) -> MediaRoot:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "a.bin").write_text("a")
    (root / "deep" / "b.bin").write_text("b")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "rootless").mkdir()
    (tmp_path / "rootless" / "c").write_text("c")
    (root / "inside").symlink_to(root / "deep")
    (root / "outside").symlink_to(tmp_path)
    (root / "secret").symlink_to(tmp_path / "secret")
    (root / "circle").symlink_to(root / "circle")
    return MediaRoot(str(root))


@pytest.mark.parametrize("name", ["a.bin", "./a.bin", "deep/b.bin", "inside/b.bin", "deep//b.bin"])
def test_files_inside(world: MediaRoot, name: str) -> None:
    assert world.file(name, "input_embeds").read_text() in ("a", "b")


OUTSIDE = [
    "", ".", "deep", "missing", "../secret", "../root/a.bin", "deep/../a.bin", "/etc/passwd", "//etc/passwd",
    "outside/secret", "outside/root/a.bin/x", "secret", "circle", "a.bin/x", "a\0b", "../rootless/c",
    "x" * 5000, "~/a.bin", "a.bin\n", "file:///etc/passwd", "..",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=lambda n: repr(n[:20]))
def test_nothing_outside(world: MediaRoot, name: str) -> None:
    with pytest.raises(RowError) as caught:
        world.file(name, "input_embeds")
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.MEDIA_ERROR, "input_embeds")


def test_what_stands_outside_is_not_told(world: MediaRoot, tmp_path: Path) -> None:
    messages = set()
    for name in ("secret", "outside/none"):
        with pytest.raises(RowError) as caught:
            world.file(name, "input_embeds")
        messages.add(caught.value.info.message.replace(name, "NAME"))
    assert len(messages) == 1


def test_a_run_without_a_folder_names_no_files() -> None:
    with pytest.raises(RowError, match="--media-root"):
        MediaRoot(None).file("a.bin", "input_embeds")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        MediaRoot(str(tmp_path / "none"))
