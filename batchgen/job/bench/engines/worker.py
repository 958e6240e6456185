"""The process around one engine: JSON requests on stdin, one JSON reply each on stdout.

Run as a script under the engine's own interpreter, which need not have batchgen: `python worker.py
engine_transformers`. The engine stands in a script of that name beside this file, which defines

    load(request) -> object with
        version: str
        describe() -> dict: dtype, device, threads in force, and `settings`, the settings worth trying
        generate(rows, setting) -> (list of lists of new ids, dict of counted quantities)
        prepare(setting), where it has one: called before each `generate`, outside the time that is measured; builds
            what a setting needs, and forgets the prompts of earlier passes
        warm(rows, setting), where it has one: called behind `prepare` with the rows to come; may compute anything but
            what these rows could use

where rows are dicts {"ids": [...], "max_new": n, "samples": n, "fields": {...}} (`fields` in batchgen's words, given
only to engines that `peers.py` says know them), a setting is one of `settings`, and the ids of a row's samples stand
one after the other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


def serve(name: str, requests: TextIO, replies: TextIO) -> None:
    """Answer until stdin ends. What goes wrong is the reply; the process lives on."""
    engine: Any = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                engine = runpy.run_path(str(Path(__file__).with_name(f"{name}.py")))["load"](request)
                reply = {"version": engine.version, **engine.describe()}
            else:
                reply = _timed(engine, request["rows"], request["setting"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _timed(engine: Any, rows: list[dict[str, Any]], setting: dict[str, Any]) -> dict[str, Any]:
    if hasattr(engine, "prepare"):
        engine.prepare(setting)
    if hasattr(engine, "warm"):
        engine.warm(rows, setting)
    cpu, begin = _cpu_seconds(), time.perf_counter()
    outputs, counted = engine.generate(rows, setting)
    seconds = time.perf_counter() - begin
    return {"outputs": outputs, "counted": counted, "seconds": seconds, "cpu_seconds": _cpu_seconds() - cpu}


def _cpu_seconds() -> float:
    """Processor time of all threads, the kernel's share included, and of processes that the engine started."""
    seconds = _of_processes(os.getpid())
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def _of_processes(parent: int) -> float:
    """Of those that run, and theirs; 0 where the system does not list them."""
    seconds = 0.0
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # it ended just now
            for child in map(int, path.read_text().split()):
                user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + _of_processes(child)
    return seconds


def _lend_tools() -> None:
    """Make `peer_tools` importable, and nothing else of this folder: its names are not for the engine's imports."""
    del sys.path[0]
    spec = importlib.util.spec_from_file_location("peer_tools", Path(__file__).with_name("peer_tools.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["peer_tools"] = tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)


def main() -> None:
    """Keep stdout for the replies: what libraries print goes to stderr."""
    _lend_tools()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
