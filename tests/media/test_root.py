"""Rows can name files under --media-root, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.media.root import MediaRoot
from tests.cases import each


@pytest.fixture
def media_root(tmp_path: Path) -> MediaRoot:
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
def test_files_under_the_root_are_found(media_root: MediaRoot, name: str) -> None:
    assert media_root.resolve(name, "input_embeds").read_text() in ("a", "b")


OUTSIDE = [
    "", ".", "deep", "missing", "../secret", "../root/a.bin", "deep/../a.bin", "/etc/passwd", "//etc/passwd",
    "outside/secret", "outside/root/a.bin/x", "secret", "circle", "a.bin/x", "a\0b", "../rootless/c",
    "x" * 5000, "~/a.bin", "a.bin\n", "file:///etc/passwd", "..",
]  # fmt: skip


@each("name", OUTSIDE)
def test_other_names_are_refused(media_root: MediaRoot, name: str) -> None:
    with pytest.raises(RowError) as caught:
        media_root.resolve(name, "input_embeds")
    assert (caught.value.info.code, caught.value.info.param) == (ErrorCode.MEDIA_ERROR, "input_embeds")


def test_message_does_not_reveal_files_outside_the_root(media_root: MediaRoot, tmp_path: Path) -> None:
    messages = set()
    for name in ("secret", "outside/none"):
        with pytest.raises(RowError) as caught:
            media_root.resolve(name, "input_embeds")
        messages.add(caught.value.info.message.replace(name, "NAME"))
    assert len(messages) == 1


def test_files_are_refused_without_a_root() -> None:
    with pytest.raises(RowError, match="--media-root"):
        MediaRoot(None).resolve("a.bin", "input_embeds")


def test_missing_root_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        MediaRoot(str(tmp_path / "none"))
