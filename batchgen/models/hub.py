"""Names of models: local folders, and ids of the Hugging Face hub and its local cache."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from batchgen.errors import ModelError
from batchgen.gguf.header import SUFFIX, is_later_part
from batchgen.request.foreign_text import ForeignTextError, read_json_file, typed

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PLAIN_NAME: Final = re.compile(r"(?!\.\.?$)[^/\\:\0]+")
"""A name of a file that cannot lead to another folder."""
MODEL_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
TOKENIZER_FILES: Final = ("*.json", "*.model", "*.txt", "*.jinja")
_HUB_TIMEOUT: Final = 5.0
"""Timeout of the first request to the hub, before any download."""
_INDEX: Final = "model.safetensors.index.json"
_GGUF_COMPANIONS: Final = ("mmproj", "imatrix")
"""In the names of GGUF files that go with a model: its vision tower, statistics of its quantisation."""
_LISTED: Final = 5
"""Most files that an error names."""
_OTHER_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "adapter_config.json")


def resolve_model(
    path_or_id: str | os.PathLike[str], revision: str | None = None, files: Sequence[str] = MODEL_FILES
) -> Path:
    """Resolve a local path or a Hugging Face hub id to a folder, or to the GGUF file that is named or alone in it.

    An id is looked up in the local cache first; the network is used only if Hugging Face's settings (`HF_HUB_OFFLINE`)
    allow it.

    Args:
        path_or_id: a folder or an id.
        revision: branch, tag or commit of an id.
        files: patterns of the files to download.

    Raises:
        ModelError: there is no such folder, and no complete hub model with that id is available; the message says why.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return (_only_gguf(path) or path) if files == MODEL_FILES else path
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if path.exists():
        raise ModelError(
            f"{path} is not a folder. Name the folder that holds config.json and the safetensors files, or a GGUF file."
        )
    if path.suffix == SUFFIX:
        raise ModelError(f"There is no file {path}. Check the path.")
    name = os.fspath(path_or_id)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no model folder {path}. Check the path.")
    return _from_hub(name, revision, files)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF model of a folder without safetensors; None if it has none.

    Raises:
        ModelError: it has several.
    """
    if any(folder.glob("*.safetensors")) or (folder / _INDEX).exists():
        return None
    found = sorted(file for file in folder.glob(f"*{SUFFIX}") if not is_later_part(file))
    found = [file for file in found if not any(word in file.name.lower() for word in _GGUF_COMPANIONS)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:_LISTED])
        more = ", ..." if len(found) > _LISTED else ""
        raise ModelError(f"{folder} holds {len(found)} GGUF models: {names}{more}. Name one of these files.")
    return found[0] if found else None


def _from_hub(name: str, revision: str | None, files: Sequence[str]) -> Path:
    # The import is slow, and local folders do not need it.
    import huggingface_hub
    from huggingface_hub import constants, errors

    def snapshot(local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, local_files_only=local, allow_patterns=list(files)
            )
        )

    lacks: str | None = None
    try:
        cached = snapshot(local=True)
        lacks = _missing_file(cached) if files == MODEL_FILES else None
        if lacks is None:
            return cached
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ValueError) as error:
        lacks = "some of its files" if hasattr(error, "snapshot_path") else None  # an interrupted download
    if constants.HF_HUB_OFFLINE:
        raise ModelError(_offline(name, revision, lacks))
    try:
        # Check availability first, because a download without network retries for minutes.
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT)
        return snapshot(local=False)
    except Exception as error:  # the client also raises the errors of its transport
        raise ModelError(_refusal(name, revision, error, constants.ENDPOINT, lacks)) from None


def _missing_file(folder: Path) -> str | None:
    """Name of a file that a cached model lacks, as after an interrupted download; None if it is complete."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / "model.safetensors").is_file():
        return None
    try:
        shards = read_weight_map(folder / _INDEX).values()
        return next((shard for shard in sorted(set(shards)) if not (folder / shard).is_file()), None)
    except (OSError, ForeignTextError):  # the check of the model names the damage
        found = (folder / _INDEX).is_file() or any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS)
        return None if found else "model.safetensors"


def read_weight_map(file: Path) -> dict[str, str]:
    """Tensor -> name of its file, from an index of weights.

    Raises:
        OSError: it cannot be read.
        ForeignTextError: it is not an index.
    """
    found: dict[str, str] = typed(read_json_file(file), {"weight_map": dict})["weight_map"]
    if not found or not all(type(shard) is str and _PLAIN_NAME.fullmatch(shard) for shard in found.values()):
        raise ForeignTextError("must name a file in the folder, without a path, for every tensor")
    return found


def _offline(name: str, revision: str | None, lacks: str | None) -> str:
    what = f"revision {revision} of {name}" if revision else name
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if lacks is not None:
        return (
            f"The local cache has only a part of {what}: it lacks {lacks}, and HF_HUB_OFFLINE is set. Download the "
            f"rest with: {download}"
        )
    return (
        f"There is no folder {name}, and {what} is not in the local cache (HF_HUB_OFFLINE is set). Download it first "
        f"with: {download}. Or name a folder."
    )


def _refusal(name: str, revision: str | None, error: Exception, endpoint: str, lacks: str | None) -> str:
    """What went wrong at the hub, and the remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the library also looks into the cache before it gives up
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated: the hub gives it only to those whom its owner has granted access. Accept its terms at "
            f"{endpoint}/{name}, log in with: hf auth login (or set HF_TOKEN)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision or 'main'} at {endpoint}. Check --revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"There is no folder {name}, and no hub model of that name at {endpoint}. Check the name. If the model is "
            "private, log in with: hf auth login (or set HF_TOKEN)."
        )
    if isinstance(error, errors.HFValidationError):
        return f"There is no folder {name}, and the name is not an id of a hub model: {_reason(error)}. Check the name."
    if status in (401, 403):
        return (
            f"The hub at {endpoint} refuses access to {name} ({status}). Log in with: hf auth login (or set HF_TOKEN)."
        )
    if status is not None:
        return (
            f"The hub at {endpoint} has no answer for {name} (HTTP status {status}). Try again later, or name a folder."
        )
    part = f" The local cache has only a part of the model: it lacks {lacks}." if lacks is not None else ""
    network = isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, OSError) and error.errno is not None and not network:
        return (
            f"{name} cannot be downloaded: {error.strerror or _reason(error)}. Check the disk of the local cache.{part}"
        )
    return (
        f"There is no folder {name}, and the hub at {endpoint} cannot be reached: {_reason(error)}. Check the network, "
        f"HF_ENDPOINT and the proxy, or name a local folder.{part}"
    )


def _reason(error: Exception) -> str:
    return (str(error).strip().split("\n")[0][:200] or type(error).__name__).rstrip(".")
