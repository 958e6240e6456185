"""URLs: nothing is fetched but what lies below an allowed prefix, within the limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from batchgen.errors import UsageError
from batchgen.media import sources, urls
from batchgen.media.faults import MediaFault
from batchgen.media.root import MediaRoot
from batchgen.media.store import MediaLimits, MediaStore
from batchgen.media.urls import FetchedUrls, MediaUrls
from batchgen.request.fields.media import MediaItem
from batchgen.request.table.unnamed_file import UnnamedFile
from tests.cases import each
from tests.media.samples import pixels, saved


class _Pages(BaseHTTPRequestHandler):
    """Answers by the last part of the path."""

    asked: ClassVar[list[str]] = []
    content = b"bytes"
    held = threading.Event()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        targets = {"inside": "/pictures/a.png", "outside": "/secret", "elsewhere": "http://127.0.0.1:9/pictures/a.png",
                   "file": "file:///etc/passwd", "circle": "/pictures/circle"}  # fmt: skip
        if name in targets:
            self.send_response(302)
            self.send_header("Location", targets[name])
            self.end_headers()
            return
        self.send_response(404 if name == "missing" else 200)
        self.send_header("Content-Length", {"short": "100", "large": str(1 << 40)}.get(name, str(len(self.content))))
        self.end_headers()
        with suppress(OSError):  # the client may have enough
            if name == "held":
                self.wfile.write(self.content[:3])
                assert self.held.wait(20)
                self.wfile.write(self.content[3:])
                return
            for at in range(0, len(self.content), 1 if name == "slow" else 1 << 20):
                self.wfile.write(self.content[at:][: 1 if name == "slow" else None])
                time.sleep(0.1 if name == "slow" else 0)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def fetcher(server: str, monkeypatch: pytest.MonkeyPatch) -> MediaUrls:
    monkeypatch.setenv("no_proxy", "*")
    _Pages.asked.clear()
    return MediaUrls([f"{server}/pictures/"])


@pytest.mark.parametrize("name", ["a.png", "deep/b%20c.png", "a.png?size=1", "inside"])
def test_what_lies_below_a_prefix_is_fetched(fetcher: MediaUrls, server: str, name: str) -> None:
    assert fetcher.fetch(f"{server}/pictures/{name}") == b"bytes"


def test_a_url_is_fetched_once_by_a_store(fetcher: MediaUrls, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    png = saved(pixels(), "PNG")
    monkeypatch.setattr(_Pages, "content", png)
    store = MediaStore(MediaRoot(None), MediaLimits(1000, 1, 1), 16000, fetcher)
    headers = {store.add(MediaItem("image", f"{server}/pictures/{name}", "image_data")) for name in "abaaab"}
    assert headers == {store.add(MediaItem("image", png, "image_data"))}
    assert sorted(_Pages.asked) == ["/pictures/a", "/pictures/b"]


@pytest.mark.parametrize(
    "url",
    ["/secret", "/pictures", "/picturesque/a.png", "/pictures/../secret", "/pictures/%2e%2e/secret",
     "/pictures/%252e%252e/secret", "/pictures/..%2fsecret", "/pictures/..\\secret", "/pictures/a b", "/pictures/é"],
)  # fmt: skip
def test_what_does_not_is_never_asked_for(fetcher: MediaUrls, server: str, url: str) -> None:
    with pytest.raises(MediaFault, match="may not be fetched; download the file, or allow it with --allow-media-url"):
        fetcher.fetch(server + url)
    assert _Pages.asked == []


@each(
    "prefix, url, allowed",
    [
        ("https://a.example/x/", "https://a.example/x/y", True),
        ("https://a.example/x/", "HTTPS://A.EXAMPLE:443/x/y", True),
        ("https://a.example", "https://a.example/x", True),
        ("https://a.example/x", "https://a.example/x", True),
        ("https://a.example/x", "https://a.example/x/y", True),
        ("https://a.example/x", "https://a.example/xy", False),
        ("https://a.example/x/", "http://a.example/x/y", False),
        ("https://a.example/x/", "https://a.example:8443/x/y", False),
        ("https://a.example/x/", "https://a.example.evil/x/y", False),
        ("https://a.example/x/", "https://evil/https://a.example/x/y", False),
        ("https://a.example/x/", "https://a.example@evil/x/y", False),
        ("https://a.example/x/", "https://user:pw@a.example/x/y", False),
        ("https://a.example/x/", "https://[::1/x/y", False),
        ("https://a.example/x/", "https://a.example:99999/x/y", False),
        ("https://a.example/x/", "https://a.example/X/y", False),
        ("https://a.example/x/", "https:///x/y", False),
        ("https://a.example/x/", "https://a.example/x/\n", False),
    ],
)
def test_prefixes(prefix: str, url: str, allowed: bool) -> None:
    assert MediaUrls([prefix]).allows(url) is allowed
    assert not MediaUrls([]).allows(url)


@pytest.mark.parametrize("prefix", ["", "a.example", "ftp://a.example/", "https://", "https://a/?x", "https://u@a/"])
def test_other_prefixes_are_a_usage_error(prefix: str) -> None:
    with pytest.raises(UsageError, match="--allow-media-url"):
        MediaUrls([prefix])


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("missing", "HTTP 404"),
        ("outside", "is redirected to 'http://127.0.0.1"),
        ("elsewhere", "is redirected to 'http://127.0.0.1:9/pictures/a.png'"),
        ("file", "is redirected to 'file:///etc/passwd'"),
        ("circle", "is redirected more than 5 times"),
        ("short", "ended after 5 of 100 bytes"),
        ("large", "MiB are allowed"),
    ],
)
def test_faults_of_a_server(fetcher: MediaUrls, server: str, name: str, word: str) -> None:
    with pytest.raises(MediaFault, match=word):
        fetcher.fetch(f"{server}/pictures/{name}")


def test_a_server_that_is_not_there(fetcher: MediaUrls) -> None:
    with pytest.raises(MediaFault, match=r"cannot be fetched from 'http://127.0.0.1:9/'.*refused"):
        MediaUrls(["http://127.0.0.1:9/"]).fetch("http://127.0.0.1:9/")


def test_one_large_item_is_in_memory_at_once_and_others_do_not_wait_in_their_time(
    fetcher: MediaUrls, server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(urls, "_LARGE_BYTES", 2)
    monkeypatch.setattr(_Pages, "held", threading.Event())
    file = UnnamedFile("test", tmp_path)
    fetched = FetchedUrls(fetcher, file)
    first, second = (f"{server}/pictures/{name}" for name in ("held", "a.png"))
    assert fetched.begin(first)
    time.sleep(0.1)
    monkeypatch.setattr(urls, "TIMEOUT_SECONDS", 0.3)
    assert fetched.begin(second)
    time.sleep(0.4)
    assert fetched.begin(second), "it waits"
    _Pages.held.set()
    assert [file.read(*fetched.get(name)) for name in (first, second)] == [b"bytes"] * 2
    assert not fetched.begin(second)
    fetched.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nbytes\r\n0\r\n"
SLOW = {
    "status line": (b"", b"H"),
    "headers": (HEAD, b"a: b\r\n"),
    "a header": (HEAD, b"a"),
    "interim responses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (HEAD + b"\r\n", b"x"),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "trailers": (CHUNKED, b"a: b\r\n"),
    "redirects": (b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n", b"\r\n"),
}
"""What a server sends at once, and what it sends piece by piece as long as it is read."""


@pytest.mark.parametrize("name", SLOW)
def test_one_limit_of_time_holds_for_all_that_a_server_sends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setenv("no_proxy", "*")
    first, then = SLOW[name]

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                sock, _ = listening.accept()
                with sock, suppress(OSError):
                    sock.recv(1 << 16)
                    sock.sendall(first)
                    while True:
                        time.sleep(0.02)
                        sock.sendall(then)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(MediaFault, match=r"takes more than 0\.1 s to fetch; download it"):
            MediaUrls([url]).fetch(url)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_limits_of_size_and_time(fetcher: MediaUrls, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "TIMEOUT_SECONDS", 0.15)
    with pytest.raises(MediaFault, match=r"takes more than 0.15 s to fetch; download it"):
        fetcher.fetch(f"{server}/pictures/slow")
    monkeypatch.setattr(sources, "MAX_ITEM_BYTES", 4)
    with pytest.raises(MediaFault, match="MiB are allowed"):
        fetcher.fetch(f"{server}/pictures/a.png")
