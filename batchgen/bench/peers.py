"""The known engines, and the Python interpreter that runs each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batchgen.bench.config import did_you_mean
from batchgen.errors import UsageError

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
"""Engines that are batchgen: all of their ids must equal the reference's, and a failure ends the run. Only they run
rows with fields; a peer would do less work on them."""

PEERS: Final[dict[str, tuple[str, ...]]] = {
    "transformers": ("transformers",),
    "transformers-continuous": ("transformers",),
    "vllm": ("vllm",),
    "vllm-zentorch": ("vllm", "zentorch"),
    "sglang": ("sglang",),
    "openvino": ("openvino_genai",),
    "llama.cpp": ("llama_cpp",),
}
"""Peer -> modules that must be importable. Its script is `engines/engine_NAME.py`, with _ for hyphens and dots."""
_SCRIPTS: Final = {**dict.fromkeys(OWN_ENGINES, OURS), "vllm-zentorch": "vllm"}
"""Engine -> name of its script, if they differ."""
_AUTO: Final = ("transformers",)
"""Peers of `--peers auto`; the others usually need a separate environment."""


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
        return "engine_" + _SCRIPTS.get(self.name, self.name).replace("-", "_").replace(".", "_")


def parse_peers(text: str) -> list[EngineSource]:
    """The peers of `--peers auto|none|NAME[=PYTHON],...`.

    `baseline=FOLDER` is another checkout of batchgen; `deterministic` and `first-come` are `VARIANTS`.

    Raises:
        UsageError: a name is unknown or repeated, or the interpreter cannot import the engine.
    """
    if text == "none":
        return []
    if text == "auto":
        return [source for source in map(EngineSource, _AUTO) if not _missing_modules(source)]
    peers: list[EngineSource] = []
    for item in text.split(","):
        name, given, value = item.strip().partition("=")
        if name not in (known := (*PEERS, BASELINE, *VARIANTS)):
            problem = f"unknown peer {name!r}{did_you_mean(name, known)}" if name else "a name is missing"
            raise UsageError(f"--peers: {problem}; known: {', '.join(known)} (or auto, none)")
        if any(peer.name == name for peer in peers):
            raise UsageError(f"--peers: {name} is given more than once")
        peers.append(_baseline(value) if name == BASELINE else _source(name, value if given else None))
    return peers


def _source(name: str, python: str | None) -> EngineSource:
    """The source of a peer, with the interpreter that is given."""
    if name in VARIANTS:
        if python is not None:
            raise UsageError(f"--peers: {name} is this batchgen with other options and has no Python; leave =... out")
        return EngineSource(name)
    if python is not None and (not python or Path(python).expanduser().is_dir()):
        problem = f"got the folder {python}" if python else "got nothing"
        example = f"{name}={python or 'ENVIRONMENT'}/bin/python"
        raise UsageError(f"--peers: {name}= must name a Python interpreter, {problem}; for example {example}")
    source = EngineSource(name) if python is None else EngineSource(name, str(Path(python).expanduser()))
    if missing := _missing_modules(source):
        raise UsageError(
            f"--peers: {source.python} cannot import {missing}; install it there, or give "
            f"--peers {name}=PYTHON with a Python that has it"
        )
    return source


def _baseline(folder: str) -> EngineSource:
    root = Path(folder).expanduser().resolve()
    if not folder or not (root / OURS / "__init__.py").is_file():
        raise UsageError(f"--peers: {BASELINE} must name a checkout of batchgen, {BASELINE}=FOLDER, got {folder!r}")
    return EngineSource(BASELINE, root=str(root))


def _missing_modules(source: EngineSource) -> str:
    """Modules of the engine that the interpreter does not find (without importing them); empty if there are none."""
    modules = PEERS[source.name]
    code = "import sys, importlib.util as u; sys.exit(' '.join(m for m in sys.argv[1:] if not u.find_spec(m)) or 0)"
    try:
        done = subprocess.run([source.python, "-c", code, *modules], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(
            f"--peers: cannot run {source.python}: {error.strerror}; give --peers {source.name}=PYTHON"
        ) from None
    if done.returncode == 0:
        return ""
    return " and ".join([name for name in done.stderr.split() if name in modules] or modules)
