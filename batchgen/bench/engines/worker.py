"""The process around one engine: JSON requests on stdin, one JSON reply each on stdout.

Run as a script under the engine's interpreter, which need not have batchgen: `python worker.py engine_transformers`.
The engine is a script of that name in the folder of this file. It defines

    load(request) -> object with
        version: str
        describe() -> dict: dtype, device and threads in use, and `settings`, the settings to try
        generate(rows, setting) -> (list of lists of new ids, dict of counted quantities)
        prepare(setting), optional: called before each `generate`, outside the measured time; builds what the setting
            needs and clears prompts of earlier passes from caches
        warm(rows, setting), optional: called after `prepare` with the rows of the pass; may compute anything that these
            rows cannot reuse

Rows are dicts {"ids": [...], "max_new": n, "samples": n, "fields": {...}}; only engines that support `fields`
(`peers.py`) get rows with any. A setting is one of `settings`. The ids of a row's samples are concatenated.
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
    """Answer requests until stdin ends. An exception becomes the reply; the process continues."""
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
    """Processor time (user and system) of all threads of this process and its child processes."""
    seconds = _child_cpu_seconds(os.getpid())
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def _child_cpu_seconds(parent: int) -> float:
    """Processor time of all running descendants of a process; 0 if the system does not list them."""
    seconds = 0.0
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended meanwhile
            for child in map(int, path.read_text().split()):
                user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + _child_cpu_seconds(child)
    return seconds


def _expose_peer_tools() -> None:
    """Make `peer_tools` importable, but no other module of this folder, which could shadow the engine's imports."""
    del sys.path[0]
    spec = importlib.util.spec_from_file_location("peer_tools", Path(__file__).with_name("peer_tools.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["peer_tools"] = tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)


def main() -> None:
    """Serve requests. Output of libraries to stdout goes to stderr, so that stdout contains replies only."""
    _expose_peer_tools()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
