"""Places of the bytes of an item: in the row, in a file below `--media-root`, or at a URL."""

from __future__ import annotations

import base64
import re
from typing import Any, Final, TypeGuard

from batchgen.media.faults import MediaFault
from batchgen.media.images import image_format
from batchgen.media.sounds import sound_format

MAX_ITEM_BYTES: Final = 1 << 28
"""Most bytes of one encoded item."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_HEAD: Final = 16
"""Characters of base64 that show the format."""
_MAX_NAME: Final = 4096
"""Most characters of a file name."""
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")


def scheme_of(source: str) -> str | None:
    """The scheme of a URL in lower case; None for a file name or base64."""
    match = _SCHEME.match(source)
    return None if match is None else match[1].lower()


def is_url(source: Any) -> TypeGuard[str]:
    """Whether an item is at a URL of the network."""
    return isinstance(source, str) and scheme_of(source) in ("http", "https")


def data_url_bytes(url: str) -> bytes:
    """The bytes of a `data:` URL.

    Raises:
        MediaFault: it is not base64, or too long.
    """
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaFault("is a data: URL that is not base64; write data:TYPE;base64,DATA")
    return _decoded(text)


def inline_bytes(text: str) -> bytes | None:
    """The bytes of an item that is written as base64; None for text that is the name of a file.

    Text is base64 if its first bytes are those of a format that is read, or if it is too long for a name.

    Raises:
        MediaFault: it is not base64 throughout.
    """
    try:
        first = _from_base64("".join(text[: 2 * _HEAD].split())[:_HEAD])
    except ValueError:
        first = b""
    if image_format(first) is None and sound_format(first) is None and len(text) <= _MAX_NAME:
        return None
    return _decoded(text)


def check_bytes(size: int) -> None:
    """Refuse an encoded item by its size.

    Raises:
        MediaFault: it is empty or too large.
    """
    if not size:
        raise MediaFault("is empty; leave it out")
    if size > MAX_ITEM_BYTES:
        raise MediaFault(f"has {size >> 20} MiB; at most {MAX_ITEM_BYTES >> 20} MiB are allowed: make it smaller")


def _decoded(text: str) -> bytes:
    check_bytes(len(text) * 3 // 4 or 1)
    try:
        data = _from_base64(text)
    except ValueError:
        raise MediaFault("is not base64 throughout; encode the whole file again") from None
    check_bytes(len(data))
    return data


def _from_base64(text: str) -> bytes:
    """Bytes of base64, also that of URLs, with line ends, or without the padding."""
    data = text.encode("ascii").translate(_STANDARD, b" \t\r\n")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
