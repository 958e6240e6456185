"""The process around one engine: JSON requests on stdin, one JSON reply each on stdout.

Run as a script under the engine's own interpreter, which need not have batchgen: `python worker.py
engine_transformers`. The engine stands in a script of that name beside this file, which defines

    load(request) -> object with
        version: str
        describe() -> dict: dtype, device, threads in force, and `settings`, the settings worth trying
        generate(rows, setting) -> (list of lists of new ids, dict of counted quantities)

where rows are dicts {"ids": [...], "max_new": n, "samples": n, "fields": {...}} (`fields` is for batchgen alone), a
setting is one of `settings`, and the ids of a row's samples stand one after the other.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
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
    cpu, begin = _cpu_seconds(), time.perf_counter()
    outputs, counted = engine.generate(rows, setting)
    seconds = time.perf_counter() - begin
    return {"outputs": outputs, "counted": counted, "seconds": seconds, "cpu_seconds": _cpu_seconds() - cpu}


def _cpu_seconds() -> float:
    """Processor time of all threads, the kernel's share included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Keep stdout for the replies: what libraries print goes to stderr."""
    del sys.path[0]  # this folder: its names are not for the engine's imports
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
