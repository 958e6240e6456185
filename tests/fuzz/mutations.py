"""Changes of inputs: of bytes, of text with words of its language, and of JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

BYTES = (
    0x00,
    0x0A,
    0x0D,
    0x1B,
    0x20,
    0x22,
    0x2C,
    0x5B,
    0x5C,
    0x7B,
    0x7D,
    0x7F,
    0x80,
    0x9B,
    0xC0,
    0xED,
    0xEF,
    0xFE,
    0xFF,
)
TEXTS = (
    "", "a", " ", "\n", "\0", "é", "日本", "😀", "\u2028", "\u202e", "\x9b31m", "\x1b]0;x\x07", "e\u0301", "\ufeff",
    "\ud800",
    "row-0", "null", "true", "0", "-1", "1e3", "NaN", "../../x", "/", "@x", "{{ 1 }}", "<s>", "</s>", "<|im_end|>",
    "%s", "a" * 300,
    "a" * 5000, "text", "prompt", "id", "user", "*", "auto",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63),
    -(2**63) - 1,
    2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-5, 9e-6, 1.5, 2.0, 2.5, -0.01, 1e308, 5e-324, 1e39, 100.0, 101.0,
    2.0**60,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
"""Numbers at and beyond the edges of types and ranges."""


def any_value(rng: Random, words: Sequence[str] = (), depth: int = 3) -> Any:
    """A JSON value of any type; `words` are likely keys and strings."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.randint(-1000, 1000)
    if kind in (3, 4, 5):
        return rng.choice(words) if words and rng.random() < 0.5 else rng.choice(TEXTS)
    size = rng.choice((0, 1, 1, 2, 3))
    if kind == 6:
        return [any_value(rng, words, depth - 1) for _ in range(size)]
    keys = words or TEXTS
    return {rng.choice(keys): any_value(rng, words, depth - 1) for _ in range(size)}


def mutate_bytes(data: bytes, rng: Random, words: Sequence[bytes] = ()) -> bytes:
    """One to four random changes of bytes, or insertions of words."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 32, 200))
        match rng.randrange(8 if words else 6):
            case 0 if out:
                out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[min(at, len(out) - 1)] = rng.choice(BYTES)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = bytes(rng.choice(BYTES) for _ in range(min(size, 8)))
            case 4:
                out[at:at] = out[at : at + size] * rng.choice((1, 1, 2, 20))
            case 5:
                other = rng.randrange(len(out) + 1)
                out[at:at] = out[other : other + size]
            case _:
                out[at : at + rng.choice((0, 0, 1, 8))] = rng.choice(words or (b"",))
    return bytes(out)


def mutate_value(value: Any, rng: Random, words: Sequence[str] = ()) -> Any:
    """`value` with one of its parts replaced, removed, repeated or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed = dict(value)
        key = rng.choice(list(changed))
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[any_key(rng, words)] = changed.pop(key)
            case 2 | 3:
                changed[any_key(rng, words)] = any_value(rng, words)
            case _:
                changed[key] = mutate_value(changed[key], rng, words)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        changed_list = list(value)
        at = rng.randrange(len(changed_list))
        match rng.randrange(6):
            case 0:
                del changed_list[at]
            case 1:
                changed_list.insert(at, any_value(rng, words))
            case 2:
                changed_list[at:at] = changed_list[at : at + 1] * rng.choice((1, 2, 40))
            case _:
                changed_list[at] = mutate_value(changed_list[at], rng, words)
        return changed_list
    match rng.randrange(8):
        case 0:
            return [value]
        case 1:
            return {any_key(rng, words): value}
        case 2 if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice(TEXTS) + value[at:]
        case 3 if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            return value + rng.choice((1, -1, 0.5, 2**31))
        case _:
            return any_value(rng, words)


def any_key(rng: Random, words: Sequence[str]) -> str:
    return rng.choice(words) if words and rng.random() < 0.9 else rng.choice(TEXTS)


def dump(value: Any) -> bytes:
    """JSON text, with NaN, infinities and lone surrogates where the value has them."""
    return json.dumps(value, ensure_ascii=True).encode()


def load(data: bytes) -> Any:
    """A value from `dump`.

    Raises:
        ValueError: it is not one.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("too deep") from None


def value_mutator(words: Sequence[str], make: Callable[[Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """A mutator of inputs that are one JSON value; others are replaced."""

    def mutate(data: bytes, rng: Random) -> bytes:
        try:
            value = load(data)
        except ValueError:
            return make(rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate_value(value, rng, words)
        return dump(value)

    return mutate
