"""Real servers for tests of data at URLs: moto's S3, a proxy in front of it that injects faults, and one at https://."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
Answer = tuple[int, bytes]
"""Status and body of an answer."""


@contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """moto's server in a separate process; gives its port."""
    with _server(log, lambda port: [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]) as port:
        yield port


@contextmanager
def gs_server(log: Path, bucket: str) -> Iterator[dict[str, str]]:
    """An emulator of Google's storage in a separate process; gives what a command needs to use it."""
    code = "from gcp_storage_emulator.__main__ import main; main()"
    words = [sys.executable, "-c", code, "start", f"--host={HOST}", "--in-memory", f"--default-bucket={bucket}"]
    with _server(log, lambda port: [*words, f"--port={port}"]) as port:
        yield {"STORAGE_EMULATOR_HOST": f"http://{HOST}:{port}"}


@contextmanager
def _server(log: Path, words: Callable[[int], list[str]]) -> Iterator[int]:
    """A server that `words` start at a port. It is ended by its number."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    with log.open("wb") as stream:
        server = subprocess.Popen(words(port), stdout=stream, stderr=stream, env={**os.environ, **CREDENTIALS})
    try:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((HOST, port), 1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.05)
        yield port
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait()


def s3_error(status: int, code: str) -> Answer:
    """An answer as S3 gives it."""
    return status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@dataclass
class Proxy:
    """A server that passes requests on to another one, unless its rule answers."""

    target: int
    rule: Callable[[str, str], Answer | None] = lambda method, path: None
    """(method, path with query) -> an answer in place of the server's; it may wait."""
    seen: list[str] = field(default_factory=list)
    """`METHOD PATH` of each request."""
    port: int = 0

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Listen; `port` is set."""
        server = ThreadingHTTPServer((HOST, 0), self._handler())
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """What a command needs to use this server."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{HOST}:{self.port}"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                proxy.seen.append(f"{self.command} {self.path}")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = proxy.rule(self.command, self.path)
                if answer is not None:
                    self._answer(answer[0], [], answer[1])
                    return
                upstream = http.client.HTTPConnection(HOST, proxy.target)
                upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() != "expect":
                        upstream.putheader(name, value)
                upstream.endheaders(body)
                response = upstream.getresponse()
                content = response.read()
                headers = [
                    (n, v) for n, v in response.getheaders() if n.lower() not in ("connection", "server", "date")
                ]
                self._answer(response.status, headers, content)
                upstream.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                if not any(name.lower() == "content-length" for name, _ in headers):
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # a client that was killed
                    self.close_connection = True

        return Handler


@contextmanager
def https_server(
    files: dict[str, bytes], folder: Path, *, ranges: bool = True
) -> Iterator[tuple[str, Path, list[str]]]:
    """A server of files at https:// with a certificate that it signs itself.

    Args:
        files: path -> content.
        folder: gets the certificate.
        ranges: whether it says ETags and gives parts of files.

    Yields:
        Its address, the certificate, and the `METHOD PATH [RANGE]` of each request so far.
    """
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            seen.append(" ".join(filter(None, (self.command, self.path, self.headers.get("Range")))))
            content = files.get(self.path.partition("?")[0])
            status, body = (404, b"") if content is None else (200, content)
            headers = {}
            if content is not None and ranges:
                headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
                if asked:
                    start, end = int(asked[1]), int(asked[2] or len(content) - 1)
                    status, body = 206, content[start : end + 1]
                    headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_HEAD = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    certificate = folder / "certificate.pem"
    _write_certificate(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://{HOST}:{server.server_address[1]}", certificate, seen
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A hub with one dataset, `user/name`: what its file system asks for.

    Args:
        files: path -> content.

    Yields:
        What a command needs to use it, and the paths of the requests so far.
    """
    seen: list[str] = []
    tree, resolve = "/api/datasets/user/name/tree/main", "/datasets/user/name/resolve/main/"

    def listed(folder: str) -> list[dict[str, Any]]:
        names = {name[len(folder) :].split("/")[0]: name for name in files if name.startswith(folder)}
        return [
            {
                "type": "file",
                "path": folder + name,
                "size": len(files[path]),
                "oid": hashlib.sha1(files[path]).hexdigest(),
            }
            if folder + name == path
            else {"type": "directory", "path": folder + name, "size": 0, "oid": "0" * 40}
            for name, path in sorted(names.items())
        ]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(self.path)
            path = self.path.partition("?")[0]
            status, body = 200, b""
            if path == "/api/datasets/user/name":
                body = json.dumps({"id": "user/name", "sha": "0" * 40}).encode()
            elif path.startswith(tree) and (found := listed((path[len(tree) + 1 :] + "/").lstrip("/"))):
                body = json.dumps(found).encode()
            elif (content := files.get(path.removeprefix(resolve))) is not None:
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
                assert asked is not None
                status, body = 206, content[int(asked[1]) : int(asked[2]) + 1]
            else:
                status = 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"HF_ENDPOINT": f"http://{HOST}:{server.server_address[1]}", "HF_HUB_OFFLINE": "0"}, seen
    finally:
        server.shutdown()
        server.server_close()


def _write_certificate(path: Path) -> None:
    """A key and the certificate of this host that it signs."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
