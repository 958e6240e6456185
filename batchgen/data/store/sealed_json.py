"""JSON objects with a checksum inside, for small files of a work folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

_CHECKSUM: Final = "checksum"
_SEALED: Final = "sealed"
"""Key that every sealed object has, so that one that lost its checksum is not taken for one of an earlier version."""


def sealed(values: Mapping[str, Any]) -> bytes:
    """JSON text of an object with a checksum of its values."""
    whole = {**values, _SEALED: True}
    text = json.dumps({**whole, _CHECKSUM: _crc(whole)}, ensure_ascii=False, indent=1, sort_keys=True)
    return text.encode("utf-8", "surrogatepass")


def unsealed(data: bytes) -> dict[str, Any]:
    """The object of a JSON text from `sealed`, or of one that an earlier version wrote without a checksum.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        values = json.loads(data.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it holds no object")
    crc = values.pop(_CHECKSUM, None)
    if (crc is not None or _SEALED in values) and crc != _crc(values):
        raise ValueError("its checksum is wrong")
    values.pop(_SEALED, None)
    return values


def _crc(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
