"""The guard of library calls on foreign files: what is the file's becomes a `ModelError`, all else passes."""

from __future__ import annotations

import errno

import pytest
import torch

from batchgen.errors import ModelError, OutputError, library_errors

PanicException = type("PanicException", (BaseException,), {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Exception("no <unk>.\nMore."), "Exception: no <unk>"),
        (ValueError("field 'size':\n  TypeError: a string.\nMore."), "ValueError: field 'size': TypeError: a string"),
        (KeyError(), "KeyError"),
        (OSError(errno.ENOENT, "no such file"), r"FileNotFoundError: .Errno 2. no such file"),
        (PanicException("index out of range"), "PanicException: index out of range"),
    ],
)
def test_whatever_a_library_raises_says_what_is_wrong(error: BaseException, words: str) -> None:
    message = rf"^x cannot be read: {words}\. Name another\.$"
    with pytest.raises(ModelError, match=message) as caught, library_errors("x cannot be read", "Name another."):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutputError("full"),
        KeyboardInterrupt(),
        SystemExit(),
        OSError(errno.ENOSPC, "full"),
        torch.OutOfMemoryError("no memory of the device"),
        RuntimeError("CUDA error: an illegal access"),
    ],
)
def test_what_is_not_the_files_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, library_errors("x cannot be read"):
        raise error
    assert caught.value is error
