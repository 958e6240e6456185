"""Files of a model: its folder, by path or by id of the Hugging Face hub, and its weight files under whatever names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from batchgen.errors import ModelError
from batchgen.gguf.header import SUFFIX, is_later_part
from batchgen.models.checkpoint.pickled_weights import PICKLE, PICKLE_INDEX, PICKLE_SHARDS
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
_SINGLE: Final = "model.safetensors"
_VARIANT_INDEX: Final = "model.safetensors.index.*.json"
_SHARD: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")
_NOT_MODEL: Final = ("adapter_model*", "consolidated*", "optimizer*", "mmproj*", "draft*", "eagle*", "medusa*")
"""Other safetensors files in the folder of a model."""
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
    models = sorted(file for file in folder.glob(f"*{SUFFIX}") if not is_later_part(file))
    models = [file for file in models if not any(word in file.name.lower() for word in _GGUF_COMPANIONS)]
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:_LISTED])
        more = ", ..." if len(models) > _LISTED else ""
        raise ModelError(f"{folder} holds {len(models)} GGUF models: {names}{more}. Name one of these files.")
    return models[0] if models else None


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
    if (folder / _SINGLE).is_file():
        return None
    try:
        shards = read_weight_map(folder / _INDEX).values()
        return next((shard for shard in sorted(set(shards)) if not (folder / shard).is_file()), None)
    except (OSError, ForeignTextError):  # the check of the model names the damage
        has_weights = (folder / _INDEX).is_file() or any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS)
        return None if has_weights else _SINGLE


def read_weight_map(file: Path) -> dict[str, str]:
    """Tensor -> name of its file, from an index of weights.

    Raises:
        OSError: it cannot be read.
        ForeignTextError: it is not an index.
    """
    files: dict[str, str] = typed(read_json_file(file), {"weight_map": dict})["weight_map"]
    if not files or not all(type(shard) is str and _PLAIN_NAME.fullmatch(shard) for shard in files.values()):
        raise ForeignTextError("must name a file in the folder, without a path, for every tensor")
    return files


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
    """Message for an error of the hub, with the remedy."""
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


def find_weight_files(folder: Path, *, pickles: bool = False) -> tuple[dict[str, Path], list[Path]]:
    """The index (tensor -> file, empty without one) and the files that exist.

    In this order: an index with a file that exists, `model.safetensors`, one variant of either
    (`model.fp16.safetensors`), the shards of one model without an index, one file of any other name; with `pickles`,
    and none of these, `pytorch_model.bin`, its index, its shards.

    Raises:
        ModelError: there are none, those of several models, or no shards of all; the message says how to run what is
            there.
    """
    single = folder / _SINGLE
    if (folder / _INDEX).is_file():
        index, files = _indexed(folder / _INDEX, needed=not single.is_file())
        if files:
            return index, files
    if single.is_file():
        return {}, [single]
    variants = sorted(folder.glob(_VARIANT_INDEX))
    if len(variants) == 1:
        return _indexed(variants[0])
    files = sorted(file for file in folder.glob("*.safetensors") if not any(map(file.match, _NOT_MODEL)))
    if not files and pickles:
        if (folder / PICKLE).is_file():
            return {}, [folder / PICKLE]
        if (folder / PICKLE_INDEX).is_file():
            return _indexed(folder / PICKLE_INDEX)
        files = sorted(folder.glob(PICKLE_SHARDS))
    sets = {match[1] if (match := _SHARD.fullmatch(file.name)) else file.name for file in files}
    if len(sets) > 1:
        raise ModelError(
            f"{folder} holds the weights of {len(sets)} models, or of one in several forms ({_names(files)}), and no "
            f"{_SINGLE}. Keep one of them, or name a folder that holds one."
        )
    if not files:
        raise _no_weights(folder)
    missing = _missing_shards(files)
    if missing:
        raise ModelError(
            f"{folder} holds {len(files)} of the {len(files) + len(missing)} weight files of its model and lacks "
            f"{_names([folder / name for name in missing])}, and it has no {_INDEX}. Copy the whole folder."
        )
    return {}, files


def _indexed(file: Path, *, needed: bool = True) -> tuple[dict[str, Path], list[Path]]:
    """An index and those of its files that exist, of which one must if they are `needed`."""
    try:
        index = {name: file.parent / shard for name, shard in read_weight_map(file).items()}
    except (OSError, ForeignTextError) as error:
        raise ModelError(f"{file} is not an index of weights ({error}). Copy the file again.") from None
    files = sorted(shard for shard in set(index.values()) if shard.is_file())
    if needed and not files:
        count, first = len(set(index.values())), min(index.values()).name
        raise ModelError(f"{file.parent} lacks {count} of its {count} weight files, {first} first. Copy it again.")
    return index, files


def unread_note(folder: Path, index: Mapping[str, Path]) -> str | None:
    """Note on `model.safetensors` or its index, if one is not read although both exist; else None."""
    if not ((folder / _SINGLE).is_file() and (folder / _INDEX).is_file()) or folder / _SINGLE in index.values():
        return None
    if index:
        return f"{folder / _SINGLE} is not read: {_INDEX} names other files. Remove one of them"
    return f"{folder / _INDEX} is not read: no file that it names exists, and {_SINGLE} does. Remove the index"


def _missing_shards(files: Sequence[Path]) -> list[str]:
    """Names of the shards that a set without an index lacks, by the count in their names."""
    match = _SHARD.fullmatch(files[0].name)
    if match is None:
        return []
    stem, number, count, kind = match.groups()
    first = 0 if (files[0].parent / f"{stem}-{'0' * len(number)}-of-{count}.{kind}").is_file() else 1
    wanted = range(first, min(int(count), 100_000) + first)
    names = (f"{stem}-{i:0{len(number)}}-of-{count}.{kind}" for i in wanted)
    held = {file.name for file in files}
    return [name for name in names if name not in held]


def _names(files: Sequence[Path]) -> str:
    more = f", ... ({len(files)} in all)" if len(files) > _LISTED else ""
    return ", ".join(file.name for file in files[:_LISTED]) + more


def _no_weights(folder: Path) -> ModelError:
    form = foreign_form(folder)
    if form is not None:
        return ModelError(f"{folder} {form}")
    return ModelError(f"{folder} has no {_SINGLE} or {_INDEX}. Copy the folder again.")


def foreign_form(folder: Path) -> str | None:
    """Contents of a folder that is not a checkpoint, and how to run them; None if they are not known."""
    if (folder / "adapter_config.json").is_file():
        base = _base_model(folder / "adapter_config.json")
        return (
            f"is an adapter, not a model: it changes the weights of {base or 'its base model'}. Name that model, and "
            f"the adapter next to it: --model {base or 'BASE'} --lora {folder.name or 'NAME'}={folder}"
        )
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return (
            "holds PyTorch pickles, which can run code, and no safetensors. Convert it once with "
            "transformers: from_pretrained(...) and save_pretrained(...). Or, for pytorch_model*.bin of whom you "
            "trust, add --allow-pickle-weights."
        )
    if any(folder.glob("consolidated*")) or (folder / "params.json").is_file():
        return (
            "holds weights in the format of their maker (consolidated.*, params.json), with other names and another "
            f"order of rows than in transformers. Use the same model in Hugging Face form (config.json with {_SINGLE})."
        )
    return None


def _base_model(file: Path) -> str | None:
    try:
        value = read_json_file(file)
    except (OSError, ForeignTextError):  # the reader of adapters names the damage
        return None
    base = value.get("base_model_name_or_path") if isinstance(value, dict) else None
    return base[:200] if isinstance(base, str) and base else None
