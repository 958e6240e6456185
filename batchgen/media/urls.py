"""`MediaUrls`: items fetched from where the command line allows it, and from nowhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from batchgen.errors import UsageError
from batchgen.media.faults import MediaFault, describe
from batchgen.media.sources import check_bytes
from batchgen.request.checks import show

if TYPE_CHECKING:
    import http.client

TIMEOUT_SECONDS: Final = 30.0
"""Most time of one item."""
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_BLOCK: Final = 1 << 16


class MediaUrls:
    """The prefixes of URLs that may be fetched.

    A URL is below a prefix if it has the same scheme, host and port, and its path the same beginning, up to a `/`. No
    redirect is followed out of the prefixes, and no `..` in a path, escaped or not, is accepted.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Args:
            prefixes: such as `https://example.com/images/`.

        Raises:
            UsageError: a prefix is not such a URL.
        """
        self._prefixes = tuple(map(_prefix, prefixes))

    def fetch(self, url: str) -> bytes:
        """The bytes at a URL.

        Raises:
            MediaFault: it is not below a prefix, or cannot be fetched within the limits.
        """
        if not self.allows(url):
            remedy = "download the file, or allow it with --allow-media-url PREFIX"
            raise MediaFault(f"is {show(url)}, which may not be fetched; {remedy}")
        end, target = time.monotonic() + TIMEOUT_SECONDS, url
        for _ in range(_MAX_REDIRECTS + 1):
            found = _get(target, end)
            if isinstance(found, bytes):
                return found
            target = urljoin(target, found)
            if not self.allows(target):
                raise MediaFault(f"is redirected to {show(target)}, which may not be fetched; download the file")
        raise MediaFault(f"is redirected more than {_MAX_REDIRECTS} times; download the file")

    def allows(self, url: str) -> bool:
        """Whether a URL is below a prefix."""
        try:
            parts = urlsplit(url)
            place = _place(parts)
        except ValueError:
            return False
        path = unquote(unquote(parts.path)).replace("\\", "/")
        if parts.username is not None or parts.password is not None or ".." in path.split("/"):
            return False
        if not url.isascii() or any(character <= " " for character in url):
            return False
        return any(place == allowed and _is_below(parts.path, prefix) for allowed, prefix in self._prefixes)


def _is_below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and (prefix.endswith("/") or path[len(prefix) :][:1] in ("", "/"))


def _place(parts: SplitResult) -> tuple[str, str, int]:
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError("not a URL of a host")
    return scheme, parts.hostname.lower(), parts.port or _PORTS[scheme]


def _prefix(url: str) -> tuple[tuple[str, str, int], str]:
    try:
        parts = urlsplit(url)
        if not (parts.query or parts.fragment or parts.username is not None):
            return _place(parts), parts.path or "/"
    except ValueError:
        pass
    raise UsageError(f"`--allow-media-url` {url} is not the beginning of a URL; write https://HOST/FOLDER/")


def _get(url: str, end: float) -> bytes | str:
    """The bytes at a URL, or the place to which it is redirected."""
    import http.client  # slow to import, and no job needs it but for URLs
    import urllib.error
    import urllib.request

    opener = urllib.request.OpenerDirector()  # without what follows redirects
    for handler in ("ProxyHandler", "HTTPHandler", "HTTPSHandler", "HTTPDefaultErrorHandler", "HTTPErrorProcessor"):
        opener.add_handler(getattr(urllib.request, handler)())
    request = urllib.request.Request(url, headers={"User-Agent": "batchgen", "Accept-Encoding": "identity"})
    try:
        with opener.open(request, timeout=max(end - time.monotonic(), 0.001)) as answer:
            return _read(answer, end)
    except urllib.error.HTTPError as error:
        error.close()
        place = error.headers.get("Location")
        if error.code in _REDIRECTS and place:
            return place
        raise MediaFault(f"cannot be fetched from {show(url)} (HTTP {error.code}); check the URL") from None
    except MediaFault:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = describe(getattr(error, "reason", None) or error)
        raise MediaFault(f"cannot be fetched from {show(url)} ({reason}); check the URL, or download it") from None


def _read(answer: http.client.HTTPResponse, end: float) -> bytes:
    promised = answer.headers.get("Content-Length", "")
    if promised.isdecimal():
        check_bytes(int(promised) or 1)
    found = bytearray()
    while block := answer.read1(_BLOCK):
        found += block
        check_bytes(len(found))
        if time.monotonic() > end:
            raise MediaFault(f"takes more than {TIMEOUT_SECONDS:g} s to fetch; download it")
    if promised.isdecimal() and len(found) < int(promised):
        raise MediaFault(f"ended after {len(found):,} of {promised} bytes while it was fetched; run the job again")
    return bytes(found)
