"""Code, messages and documentation use the words of the field."""

from __future__ import annotations

import pytest

from tests.docs.words import FOLDERS, ROOT, found_in, source_files


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_banned_word_is_used(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in source_files((folder,))
        for line, word in found_in(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["the pages stand beside it", "def run_beside():", "class OldOutlook:", "# told so", "this is no JSON"]
)
def test_banned_words_are_found(text: str) -> None:
    assert list(found_in(text))


@pytest.mark.parametrize("text", ["a stand-alone file", "where there is no file", "standard", "doorway", "understand"])
def test_other_words_are_not(text: str) -> None:
    assert not list(found_in(text))
