"""Local folder of a model."""

from __future__ import annotations

from pathlib import Path

from batchgen.errors import ModelError

__all__ = ["find_model_folder"]


def find_model_folder(path: str | Path, revision: str | None = None) -> Path:
    """Folder of a model, given as a folder or as a hub id in the local cache. Nothing is downloaded.

    Raises:
        ModelError: `path` is neither a folder nor a cached model.
    """
    if Path(path).is_dir():
        return Path(path)
    # Imported here: only hub ids need the library.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except Exception as error:  # not a valid id, or not in the cache
        raise ModelError(f"{path} is neither a model folder nor a model in the local cache") from error
