"""Which engines there are, and which Python runs each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.job.bench.config import meant

__all__ = [
    "BASELINE",
    "OF_BATCHGEN",
    "OURS",
    "PEERS",
    "REFERENCE",
    "VARIANTS",
    "EngineSource",
    "knows_fields",
    "parse_peers",
]

OURS = "batchgen"
REFERENCE = "transformers"
"""What every engine's greedy ids are held against, in float32 and one row at a time."""
BASELINE = "baseline"
"""Another checkout of batchgen, as it stands in a folder."""
VARIANTS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "first-come": {"order": "first-come", "admission": "free"},
}
"""batchgen itself with other options: what `--deterministic` costs, and what is gained by knowing the job: rows of the
second begin in input order, as soon as there are pages for their prompts."""
OF_BATCHGEN = (OURS, BASELINE, *VARIANTS)
"""Engines that are batchgen: their ids must be equal everywhere, and what they fail at ends the run."""

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
"""Peer -> the module whose presence says that it can run. Each has an `engines/engine_NAME.py`, _ for - and dots."""
_FIELDS: dict[str, frozenset[str]] = {}
"""Peer -> fields of special rows (`BenchRow.fields`) that its script asks the engine for; without these it is not run
on such rows: it would do less work than the others."""
_AUTO = ("transformers",)
"""Peers that are no trouble anywhere: the others are in environments of their own."""


def knows_fields(engine: str, fields: Iterable[str]) -> bool:
    """Whether an engine gives what rows with these fields ask for."""
    return engine in OF_BATCHGEN or _FIELDS.get(engine, frozenset()).issuperset(fields)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine and the interpreter that runs it."""

    name: str
    python: str = sys.executable
    root: str | None = None
    """Where `batchgen` is imported from; None for engines that are installed."""

    @property
    def script(self) -> str:
        """The file under `engines/` that drives it, without its suffix."""
        name = OURS if self.name in OF_BATCHGEN else self.name
        return "engine_" + name.replace("-", "_").replace(".", "_")


def parse_peers(text: str) -> list[EngineSource]:
    """The peers of `--peers auto|none|NAME[=PYTHON],...`, where `baseline=FOLDER` is another checkout of batchgen
    and `deterministic` and `first-come` are this one with other options.

    Raises:
        UsageError: a name is unknown or given twice, or its interpreter cannot import it.
    """
    if text == "none":
        return []
    if text == "auto":
        return [source for source in map(EngineSource, _AUTO) if _can_import(source)]
    peers: list[EngineSource] = []
    for item in text.split(","):
        name, given, python = item.strip().partition("=")
        if name not in (known := (*PEERS, BASELINE, *VARIANTS)):
            told = f"unknown peer {name!r}{meant(name, known)}" if name else "a name is missing"
            raise UsageError(f"--peers: {told}; known: {', '.join(known)} (or auto, none)")
        if any(peer.name == name for peer in peers):
            raise UsageError(f"--peers: {name} is named twice")
        if name == BASELINE:
            peers.append(_baseline(python))
            continue
        if name in VARIANTS:
            if given:
                raise UsageError(
                    f"--peers: {name} is this batchgen with other options and takes no Python; leave =... out"
                )
            peers.append(EngineSource(name))
            continue
        if given and (not python or Path(python).expanduser().is_dir()):
            what = f"is a folder: {python}" if python else "is empty"
            raise UsageError(
                f"--peers: what {name}= names {what}; name a Python, as {python or 'ENVIRONMENT'}/bin/python"
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
        raise UsageError(f"--peers: {BASELINE} takes a checkout of batchgen, {BASELINE}=FOLDER, got {folder!r}")
    return EngineSource(BASELINE, root=str(root))


def _can_import(source: EngineSource) -> bool:
    """Whether the module is installed there; it is found, not imported."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run([source.python, "-c", code, PEERS[source.name]], capture_output=True, check=False)
    except OSError as error:
        raise UsageError(
            f"--peers: cannot run {source.python}: {error.strerror}; give --peers {source.name}=PYTHON"
        ) from None
    return done.returncode == 0
