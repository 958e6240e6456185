"""A server that runs `batchgen` command lines and Python code in forked processes, and the small client of it.

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
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(s, [len(request).to_bytes(8, "big")], [0, 1, 2])
    s.sendall(request)
    sys.exit(int(s.recv(16) or b"1"))
"""


PYTHON = "python-code"
"""Name of the client whose one argument is Python code."""


def write_clients(folder: Path, address: Path) -> None:
    """Write the executables that send their command lines to the server: the console script's, and `PYTHON`."""
    for name in ("batchgen", PYTHON):
        (folder / name).write_text(_CLIENT.format(python=sys.executable, address=str(address)), encoding="utf-8")
        (folder / name).chmod(0o755)


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

    name, *words = arguments
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
    status = _run_code(*words) if Path(name).name == PYTHON else run_command(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_code(text: str) -> int:
    """Exit status of Python code that is the main module."""
    warnings.simplefilter("error", SyntaxWarning)
    sys.modules["__main__"] = module = ModuleType("__main__")
    try:
        exec(compile(text, "<snippet>", "exec"), module.__dict__)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


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
