"""`Fuzzer`: what is fuzzed, which promises are checked, and how inputs are made; and the table of all fuzzers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random

Check = Callable[[bytes], Hashable]
"""Function of an input that raises for a broken promise, and returns what kind of outcome the input has."""

CORPUS = Path(__file__).parent / "corpus"
SCRATCH = "FUZZ_SCRATCH"
"""Variable with the folder for temporary files of a worker, which the process that started it removes."""
MAX_BYTES = 1 << 16
"""Longest input."""


class BrokenPromise(AssertionError):
    """What an input did is not what the contract says."""


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """One kind of foreign data."""

    name: str
    """Also the name of its folder below `CORPUS`."""
    check: Check
    make: Callable[[Random], bytes]
    """Makes an input from nothing."""
    mutate: Callable[[bytes, Random], bytes]
    """Changes an input."""
    deeper: tuple[tuple[int, Check], ...] = ()
    """(N, slower check): every N-th input, by its hash, is checked by it, too."""

    def run(self, data: bytes, *, everything: bool = False) -> Hashable:
        """Check one input, by all checks if `everything`; return its outcome.

        Raises:
            BrokenPromise: or any other exception: a fault was found.
        """
        outcome = self.check(data)
        number = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
        for every, check in self.deeper:
            if everything or number % every == 0:
                outcome = outcome, check(data)
        return outcome

    def inputs(self) -> list[bytes]:
        """The committed inputs, in the order of their names."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]


MODULES = {
    "json-lines": "rows",
    "json-documents": "rows",
    "openai-lines": "rows",
    "delimited": "rows",
    "parameters": "parameters",
    "parquet-bytes": "parquet",
    "parquet-tables": "parquet",
    "templates": "templates",
    "schemas": "constraints",
    "patterns": "constraints",
    "grammars": "constraints",
    "models": "models",
    "gguf": "gguf_heads",
    "media-files": "media_files",
    "work": "work",
    "commands": "commands",
}
"""Name of each fuzzer -> module that has it in its `FUZZERS`."""


def fuzzer(name: str) -> Fuzzer:
    """The fuzzer of a name; one that is not in the table is in the module of its name."""
    found: tuple[Fuzzer, ...] = import_module(f"tests.fuzz.{MODULES.get(name, name)}").FUZZERS
    return next(one for one in found if one.name == name)
