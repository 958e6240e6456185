"""A server that runs `batchgen` command lines in forked processes, and the small client script that calls it.

A fresh interpreter takes seconds to import torch and transformers. The server has them imported; each command runs in a
process forked from it, with the caller's arguments, folder, environment and standard streams.

`python -m tests.docs.command_server SOCKET` serves until its standard input closes.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(s, [len(request).to_bytes(8, "big")], [0, 1, 2])
    s.sendall(request)
    sys.exit(int(s.recv(16) or b"1"))
"""


def write_client(path: Path, address: Path) -> None:
    """Write the executable that replaces the console script: it sends its command line to the server."""
    path.write_text(_CLIENT.format(python=sys.executable, address=str(address)), encoding="utf-8")
    path.chmod(0o755)


def _handle(connection: socket.socket) -> None:
    """Run one command line in a grandchild process, so that the server does not wait for it."""
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, request = int.from_bytes(head, "big"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    child = os.fork()
    if not child:
        _run(*json.loads(request), streams)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def _run(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> NoReturn:
    from batchgen.cli.app import run_command

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.path.insert(0, folder)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    status = run_command(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(address: str) -> None:
    """Serve until standard input closes."""
    import tests.e2e.warm  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the first children
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(address)
        listening.listen()
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is not sys.stdin for key, _ in selector.select()):
            with listening.accept()[0] as connection:
                _handle(connection)


if __name__ == "__main__":
    main(sys.argv[1])
