"""A fuzzer whose inputs do what faults do, for the tests of the harness: the input's text names the fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable
from random import Random

from tests.fuzz.fuzzer import BrokenPromise, Fuzzer

FAULTS = (b"crash", b"hang", b"memory", b"promise")


def _check(data: bytes) -> Hashable:
    match data:
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"hang":
            while True:
                pass
        case b"memory":
            kept = bytearray(4 << 30)
            while kept:
                kept[:: 1 << 12] = b"x" * (len(kept) >> 12)
        case b"promise":
            raise BrokenPromise("nothing is promised: x")
    return data[:1]


def _mutate(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.01:
        return rng.choice([fault for fault in FAULTS if fault.decode() in os.environ["FAULTS"]])
    return bytes([rng.randrange(256)])


FUZZERS = (Fuzzer("faulty", _check, lambda rng: b"good", _mutate),)
