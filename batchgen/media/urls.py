"""Items at URLs: `MediaUrls` fetches them from where the command line allows it, `FetchedUrls` several at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from batchgen.errors import UsageError
from batchgen.media.faults import MediaFault, describe
from batchgen.media.sources import check_bytes
from batchgen.request.checks import show
from batchgen.request.table.unnamed_file import UnnamedFile

if TYPE_CHECKING:
    import http.client
    import urllib.request

TIMEOUT_SECONDS: Final = 30.0
"""Most time of one item."""
FETCHES: Final = 16
"""Most items that are fetched at once."""
_LARGE_BYTES: Final = 16 << 20
"""Of items that are larger, one at a time is fetched, so that little memory holds them."""
_MAX_KNOWN: Final = 1 << 16
"""Most URLs of which it is known what was fetched."""
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
        self._large = Lock()
        """Held while a large item is fetched"""

    def fetch(self, url: str) -> bytes:
        """The bytes at a URL.

        Raises:
            MediaFault: it is not below a prefix, or cannot be fetched within the limits.
        """
        if not self.allows(url):
            remedy = "download the file, or allow it with --allow-media-url PREFIX"
            raise MediaFault(f"is {show(url)}, which may not be fetched; {remedy}")
        deadline, target = _Deadline(), url
        for _ in range(_MAX_REDIRECTS + 1):
            answer = _get(target, deadline, self._large)
            if isinstance(answer, bytes):
                return answer
            target = urljoin(target, answer)
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


class FetchedUrls:
    """Items at URLs, fetched side by side by threads into a file; each URL once, also one that cannot be fetched.

    Args:
        urls: what may be fetched.
        file: what is fetched goes to its end.
    """

    def __init__(self, urls: MediaUrls, file: UnnamedFile) -> None:
        self._urls = urls
        self._file = file
        self._fetches: dict[str, Future[tuple[int, int]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, url: str) -> bool:
        """Begin to fetch a URL, if it may be fetched and was not begun before; whether that is still going on."""
        future = self._fetches.get(url)
        if future is None and self._urls.allows(url):
            future = self._begin(url)
        return future is not None and not future.done()

    def get(self, url: str) -> tuple[int, int]:
        """(offset, size) of what is at a URL in the file, once it is there.

        Raises:
            MediaFault: it is not below a prefix, or cannot be fetched within the limits.
            OutputError: the disk is full or cannot be written.
        """
        return (self._fetches.get(url) or self._begin(url)).result()

    def close(self) -> None:
        """Forget what is not fetched yet."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._fetches = {
            url: future for url, future in self._fetches.items() if future.done() and not future.cancelled()
        }

    def _begin(self, url: str) -> Future[tuple[int, int]]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        if len(self._fetches) >= _MAX_KNOWN:
            self._fetches = {known: future for known, future in self._fetches.items() if not future.done()}
        future = self._fetches[url] = self._threads.submit(self._fetch, url)
        return future

    def _fetch(self, url: str) -> tuple[int, int]:
        data = self._urls.fetch(url)
        return self._file.write(data), len(data)


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


class _Deadline:
    """The time at which the fetch of one item ends, whatever the server sends."""

    def __init__(self) -> None:
        self.end = time.monotonic() + TIMEOUT_SECONDS

    def left(self) -> float:
        """Seconds that are left; `TimeoutError` if there are none."""
        if (left := self.end - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def connect(self, address: tuple[str, int], *_: Any) -> socket.socket:
        """A connection to one of the host's addresses; its timeout is what is left."""
        problem = OSError("the host has no address")
        for address_info in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            try:
                sock = socket.create_connection((str(address_info[4][0]), address[1]), self.left())
                sock.settimeout(self.left())
                return sock
            except OSError as error:
                problem = error
        raise problem

    def bound(self, response: Callable[..., Any], sock: socket.socket, *args: Any, **options: Any) -> Any:
        """A response, each read of which, also of headers and trailers, has what is left as its timeout."""
        made = response(sock, *args, **options)
        read = made.fp.raw.readinto

        def readinto(buffer: Any) -> Any:
            sock.settimeout(self.left())
            return read(buffer)

        made.fp.raw.readinto = readinto
        return made


def _get(url: str, deadline: _Deadline, large: Lock) -> bytes | str:
    """The bytes at a URL, or the place to which it is redirected."""
    import http.client  # slow to import, and no job needs it but for URLs
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "batchgen", "Accept-Encoding": "identity"})
    try:
        with _opener(deadline).open(request, timeout=deadline.left()) as answer:
            return _read(answer, deadline, large)
    except urllib.error.HTTPError as error:
        error.close()
        place = error.headers.get("Location")
        if error.code in _REDIRECTS and place:
            return place
        raise MediaFault(f"cannot be fetched from {show(url)} (HTTP {error.code}); check the URL") from None
    except MediaFault:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason: Any = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise MediaFault(f"takes more than {TIMEOUT_SECONDS:g} s to fetch; download it") from None
        problem = f"cannot be fetched from {show(url)} ({describe(reason)})"
        raise MediaFault(f"{problem}; check the URL, or download it") from None


def _opener(deadline: _Deadline) -> urllib.request.OpenerDirector:
    """An opener that follows no redirects, and does nothing past the deadline."""
    import urllib.request

    def open_by(do_open: Callable[..., Any], kind: Any, request: urllib.request.Request, **options: Any) -> Any:
        def connection(*args: Any, **more: Any) -> Any:
            made = kind(*args, **more)
            made._create_connection = deadline.connect
            made.response_class = partial(deadline.bound, kind.response_class)
            return made

        return do_open(connection, request, **options)

    opener = urllib.request.OpenerDirector()
    for name in ("ProxyHandler", "HTTPHandler", "HTTPSHandler", "HTTPDefaultErrorHandler", "HTTPErrorProcessor"):
        handler = getattr(urllib.request, name)()
        if hasattr(handler, "do_open"):
            handler.do_open = partial(open_by, handler.do_open)
        opener.add_handler(handler)
    return opener


def _read(answer: http.client.HTTPResponse, deadline: _Deadline, large: Lock) -> bytes:
    promised = answer.headers.get("Content-Length", "")
    if promised.isdecimal():
        check_bytes(int(promised) or 1)
    data = bytearray()
    with ExitStack() as held:
        while block := answer.read1(_BLOCK):
            if len(data) <= _LARGE_BYTES < len(data) + len(block):
                began = time.monotonic()
                held.enter_context(large)
                deadline.end += time.monotonic() - began
            data += block
            check_bytes(len(data))
    if promised.isdecimal() and len(data) < int(promised):
        raise MediaFault(f"ended after {len(data):,} of {promised} bytes while it was fetched; run the job again")
    return bytes(data)
