"""JSON with a checksum inside: every flipped bit is found, and text of earlier versions is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen.data.store.sealed_json import sealed, unsealed

VALUES: dict[str, Any] = {
    "job": "f00d",
    "info": {"--seed": 0, "é": [1.5, None, True]},
    "surrogate": "\udce9",
    "n": 1 << 60,
}


def test_a_sealed_object_reads_back() -> None:
    assert unsealed(sealed(VALUES)) == VALUES
    assert unsealed(json.dumps({"job": "f00d"}).encode()) == {"job": "f00d"}, "written by an earlier version"


def test_every_flipped_bit_is_found_unless_it_changes_no_value() -> None:
    whole = sealed(VALUES)
    for at in range(len(whole)):
        for bit in range(8):
            data = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            try:
                found = unsealed(data)
            except ValueError:
                continue
            assert found == VALUES, f"bit {bit} of byte {at}"
            assert whole[at : at + 1].isspace(), f"bit {bit} of byte {at}"


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"[" * 100_000, b'{"sealed": true}', b'{"checksum": 1}'])
def test_what_is_not_whole(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unsealed(text)
