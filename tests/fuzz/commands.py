"""Fuzzer of command lines: a list of words. Whatever they are, the exit code is documented and nothing is a traceback.

Words name files of a small folder that is made again for each; `bench`, which measures for minutes, is left out.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from random import Random

from batchgen.config.run_config import BY_NAME
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.jobs import command, model_folder, scratch
from tests.fuzz.mutations import TEXTS, dump, load, mutate_bytes
from tests.fuzz.parsing import require

_COMMANDS = ("run", "run", "run", "check", "show", "report", "merge", "export", "verify", "help", "--help", "--version")
_FLAGS = (
    *sorted({option.flag for option in BY_NAME.values() if option.flag}),
    "-o", "--rows", "--row", "--errors", "--format", "--json", "--dry-run", "--help", "--no-chat", "--output", "--yes",
    "--force",
)  # fmt: skip
_VALUES = (
    "in.jsonl", "bad.jsonl", "empty.jsonl", "table.csv", "out.parquet", "new.parquet", "new.jsonl", "folder",
    "folder/new.parquet", "absent",
    "*.jsonl", "-", "jsonl", "openai-batch", "0", "1", "-1", "2", "0.5", "50%", "auto", "none", "error", "skip", "fail",
    "cpu", "cuda",
    "float32", "bfloat16", "torch", "1s", "2h", "1-02:00:00", "1MiB", "0B", "9" * 30, "nan", "inf", "true", "false",
    "id", "text", "0/2", "1/2",
    "2/2", "a=b", "fr=absent", "config.toml", "@schema.json", '{"type": "object"}', "[1]", "{", "", "topics",
    "sampling", "=", "--", "all",
)  # fmt: skip
_TOML = "temperature = 0.5\nmax_new_tokens = 2\n[unknown]\nx = 1\n"
_UNTESTED = ("bench", "--tensor-parallel", "--slurm")
"""What takes minutes, or starts other programs."""
_FILES = {
    "in.jsonl": '{"text": "a", "max_new_tokens": 2}\n{"messages": [{"role": "user", "content": "b"}], "n": 2}\n',
    "bad.jsonl": '{"text": \n{"text": "a", "n": 0}\n[1]\n',
    "empty.jsonl": "",
    "table.csv": "text,id\na,1\n",
    "config.toml": _TOML,
    "schema.json": '{"type": "string"}',
}


@cache
def _prepared() -> Path:
    """A folder with input files and one result."""
    folder = scratch() / "prepared"
    (folder / "folder").mkdir(parents=True)
    for name, content in _FILES.items():
        (folder / name).write_text(content)
    done = command(["run", "in.jsonl", "--model", model_folder(), "-o", "out.parquet"], folder)
    require(done.code == 0, "the prepared job is done:", done.stderr)
    return folder


def _words(data: bytes) -> list[str] | None:
    """The words of an input; None for those that name a place outside the folder, or hold what no command line does."""
    try:
        words = load(data)
    except ValueError:
        return None
    if type(words) is not list or not all(type(word) is str for word in words) or len(words) > 40:
        return None
    for word in words:
        outside = ".." in word or "~" in word or any(part.startswith("/") for part in (word, word.partition("=")[2]))
        if outside or "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word) or "://" in word:
            return None
        if any(word.startswith(name) for name in _UNTESTED) or (":" in word and "--logit" in " ".join(words)):
            return None
    return list(words)


def _check(data: bytes) -> Hashable:
    words = _words(data)
    if words is None:
        return None
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        shutil.copytree(_prepared(), folder, dirs_exist_ok=True)
        done = command(words, folder, stdin=b'{"text": "a", "max_new_tokens": 1}\n')
        lines = done.stderr.strip().splitlines()
        require(done.code != 2 or lines, "a usage error says what is wrong:", words)
        for name, content in _FILES.items():
            same = (folder / name).exists() and (folder / name).read_text() == content
            require(same or "--overwrite" in words, "no input file is changed:", (name, words))
        return done.code, words[:1] if words[:1] == ["run"] else None, lines[-1][:25] if done.code and lines else None
    finally:
        shutil.rmtree(folder)


def _check_hashable(data: bytes) -> Hashable:
    return json.dumps(_check(data))


def _make(rng: Random) -> bytes:
    words = [rng.choice(_COMMANDS), rng.choice(("in.jsonl", "in.jsonl", "out.parquet", rng.choice(_VALUES)))]
    if words[0] in ("run", "check") and rng.random() < 0.8:
        words += ["--max-new-tokens", "2"]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        words.append(rng.choice(_FLAGS))
        if rng.random() < 0.7:
            words.append(rng.choice(_VALUES))
    return dump(words)


def _mutate(data: bytes, rng: Random) -> bytes:
    words = _words(data)
    if not words:
        return _make(rng)
    at = rng.randrange(len(words))
    match rng.randrange(6):
        case 0:
            del words[at]
        case 1:
            words.insert(at, rng.choice(_VALUES))
        case 2:
            words[at:at] = [rng.choice(_FLAGS), rng.choice(_VALUES)]
        case 3:
            words[at] = mutate_bytes(words[at].encode(), rng).decode("utf-8", "replace")
        case 4:
            words[at] = rng.choice(TEXTS)
        case _:
            words[at] = rng.choice(_FLAGS) + "=" + rng.choice(_VALUES)
    return dump(words)


FUZZERS = (Fuzzer("commands", _check_hashable, _make, _mutate),)
