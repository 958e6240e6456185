"""Weight files of a model folder, under whatever names they have, and what a folder without any holds instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from batchgen.errors import ModelError
from batchgen.models.checkpoint.pickled_weights import PICKLE, PICKLE_INDEX, PICKLE_SHARDS
from batchgen.models.hub import read_weight_map
from batchgen.request.foreign_text import ForeignTextError, read_json_file

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_VARIANT_INDEX: Final = "model.safetensors.index.*.json"
_SHARD: Final = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")
_NOT_MODEL: Final = ("adapter_model*", "consolidated*", "optimizer*", "mmproj*", "draft*", "eagle*", "medusa*")
"""Other safetensors files in the folder of a model."""
_NAMED: Final = 5
"""Most files that a message names."""


def find_weight_files(folder: Path, *, pickles: bool = False) -> tuple[dict[str, Path], list[Path]]:
    """The index (tensor -> file, empty without one) and the files that exist.

    In this order: an index with a file that exists, `model.safetensors`, one variant of either
    (`model.fp16.safetensors`), the shards of one model without an index, one file of any other name; with `pickles`,
    and none of these, `pytorch_model.bin`, its index, its shards.

    Raises:
        ModelError: there are none, those of several models, or no shards of all; the message says how to run what is
            there.
    """
    single = folder / SINGLE
    if (folder / INDEX).is_file():
        index, files = _indexed(folder / INDEX, needed=not single.is_file())
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
    sets = {found[1] if (found := _SHARD.fullmatch(file.name)) else file.name for file in files}
    if len(sets) > 1:
        raise ModelError(
            f"{folder} holds the weights of {len(sets)} models, or of one in several forms ({_names(files)}), and no "
            f"{SINGLE}. Keep one of them, or name a folder that holds one."
        )
    if not files:
        raise _no_weights(folder)
    missing = _missing_shards(files)
    if missing:
        raise ModelError(
            f"{folder} holds {len(files)} of the {len(files) + len(missing)} weight files of its model and lacks "
            f"{_names([folder / name for name in missing])}, and it has no {INDEX}. Copy the whole folder."
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
    """Which of `model.safetensors` and its index is not read although both exist; None if there is nothing to say."""
    if not ((folder / SINGLE).is_file() and (folder / INDEX).is_file()) or folder / SINGLE in index.values():
        return None
    if index:
        return f"{folder / SINGLE} is not read: {INDEX} names other files. Remove one of them"
    return f"{folder / INDEX} is not read: no file that it names exists, and {SINGLE} does. Remove the index"


def _missing_shards(files: Sequence[Path]) -> list[str]:
    """Names of the shards that a set without an index lacks, by the count in their names."""
    found = _SHARD.fullmatch(files[0].name)
    if found is None:
        return []
    stem, number, count, kind = found.groups()
    first = 0 if (files[0].parent / f"{stem}-{'0' * len(number)}-of-{count}.{kind}").is_file() else 1
    wanted = range(first, min(int(count), 100_000) + first)
    names = (f"{stem}-{i:0{len(number)}}-of-{count}.{kind}" for i in wanted)
    held = {file.name for file in files}
    return [name for name in names if name not in held]


def _names(files: Sequence[Path]) -> str:
    more = f", ... ({len(files)} in all)" if len(files) > _NAMED else ""
    return ", ".join(file.name for file in files[:_NAMED]) + more


def _no_weights(folder: Path) -> ModelError:
    found = foreign_form(folder)
    if found is not None:
        return ModelError(f"{folder} {found}")
    return ModelError(f"{folder} has no {SINGLE} or {INDEX}. Copy the folder again.")


def foreign_form(folder: Path) -> str | None:
    """What a folder that is not a checkpoint holds, and how to run it; None if nothing that is known."""
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
            f"order of rows than in transformers. Use the same model in Hugging Face form (config.json with {SINGLE})."
        )
    return None


def _base_model(file: Path) -> str | None:
    try:
        value = read_json_file(file)
    except (OSError, ForeignTextError):  # the reader of adapters names the damage
        return None
    base = value.get("base_model_name_or_path") if isinstance(value, dict) else None
    return base[:200] if isinstance(base, str) and base else None
