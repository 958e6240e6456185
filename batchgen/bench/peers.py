"""The known engines, and the Python interpreter that runs each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.bench.config import did_you_mean
from batchgen.errors import UsageError

__all__ = [
    "BASELINE",
    "OURS",
    "OWN_ENGINES",
    "PEERS",
    "REFERENCE",
    "VARIANTS",
    "EngineSource",
    "parse_peers",
    "supports_fields",
]

OURS = "batchgen"
REFERENCE = "transformers"
"""The engine whose greedy ids are the correct ones: it runs in float32, one row at a time."""
BASELINE = "baseline"
"""Another checkout of batchgen, in a folder."""
VARIANTS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "first-come": {"order": "first-come", "admission": "free"},
}
"""batchgen with other options. `deterministic` shows the cost of `--deterministic`; `first-come` starts rows in input
order, as soon as there are pages for their prompts, and shows the gain of batchgen's scheduling."""
OWN_ENGINES = (OURS, BASELINE, *VARIANTS)
"""Engines that are batchgen: all of their ids must equal the reference's, and a failure ends the run."""

PEERS = {
    "transformers": "transformers",
    "transformers-continuous": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "openvino": "openvino_genai",
    "onnxruntime-genai": "onnxruntime_genai",
    "ctranslate2": "ctranslate2",
    "llama.cpp": "llama_cpp",
}
"""Peer -> the module that must be importable. Its script is `engines/engine_NAME.py`, with _ for hyphens and dots."""
_FIELDS: dict[str, frozenset[str]] = {}
"""Peer -> fields of special rows (`BenchRow.fields`) that its script passes to the engine. A peer does not run on rows
with other fields, because it would do less work than the other engines."""
_AUTO = ("transformers",)
"""Peers of `--peers auto`; the others usually need a separate environment."""


def supports_fields(engine: str, fields: Iterable[str]) -> bool:
    """Whether an engine supports rows with these fields."""
    return engine in OWN_ENGINES or _FIELDS.get(engine, frozenset()).issuperset(fields)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine and the interpreter that runs it."""

    name: str
    python: str = sys.executable
    root: str | None = None
    """Folder from which `batchgen` is imported; None for installed engines."""

    @property
    def script(self) -> str:
        """Name of its script in `engines/`, without the suffix."""
        name = OURS if self.name in OWN_ENGINES else self.name
        return "engine_" + name.replace("-", "_").replace(".", "_")


def parse_peers(text: str) -> list[EngineSource]:
    """The peers of `--peers auto|none|NAME[=PYTHON],...`.

    `baseline=FOLDER` is another checkout of batchgen; `deterministic` and `first-come` are `VARIANTS`.

    Raises:
        UsageError: a name is unknown or repeated, or the interpreter cannot import the engine.
    """
    if text == "none":
        return []
    if text == "auto":
        return [source for source in map(EngineSource, _AUTO) if _can_import(source)]
    peers: list[EngineSource] = []
    for item in text.split(","):
        name, given, python = item.strip().partition("=")
        if name not in (known := (*PEERS, BASELINE, *VARIANTS)):
            problem = f"unknown peer {name!r}{did_you_mean(name, known)}" if name else "a name is missing"
            raise UsageError(f"--peers: {problem}; known: {', '.join(known)} (or auto, none)")
        if any(peer.name == name for peer in peers):
            raise UsageError(f"--peers: {name} is given more than once")
        if name == BASELINE:
            peers.append(_baseline(python))
            continue
        if name in VARIANTS:
            if given:
                raise UsageError(
                    f"--peers: {name} is this batchgen with other options and has no Python; leave =... out"
                )
            peers.append(EngineSource(name))
            continue
        if given and (not python or Path(python).expanduser().is_dir()):
            problem = f"got the folder {python}" if python else "got nothing"
            raise UsageError(
                f"--peers: {name}= must name a Python interpreter, {problem}; for example "
                f"{name}={python or 'ENVIRONMENT'}/bin/python"
            )
        source = EngineSource(name, str(Path(python).expanduser())) if given else EngineSource(name)
        if not _can_import(source):
            raise UsageError(
                f"--peers: {source.python} cannot import {PEERS[name]}; install it there, or give "
                f"--peers {name}=PYTHON with a Python that has it"
            )
        peers.append(source)
    return peers


def _baseline(folder: str) -> EngineSource:
    root = Path(folder).expanduser().resolve()
    if not folder or not (root / OURS / "__init__.py").is_file():
        raise UsageError(f"--peers: {BASELINE} must name a checkout of batchgen, {BASELINE}=FOLDER, got {folder!r}")
    return EngineSource(BASELINE, root=str(root))


def _can_import(source: EngineSource) -> bool:
    """Whether the interpreter finds the engine's module (without importing it)."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run([source.python, "-c", code, PEERS[source.name]], capture_output=True, check=False)
    except OSError as error:
        raise UsageError(
            f"--peers: cannot run {source.python}: {error.strerror}; give --peers {source.name}=PYTHON"
        ) from None
    return done.returncode == 0
