"""What a folder says of embeddings and scores: the files of sentence-transformers, and the labels of its head.

Imports neither torch nor the library. `modules.json` lists modules that follow the model: how its states are pooled,
linear layers, and the norm. A folder without it is pooled as the options of the run say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from batchgen.errors import ModelError
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.checkpoint.text_part import has_scores
from batchgen.request.foreign_text import ForeignTextError, file_content, read_json
from batchgen.request.tasks import Mode, SentenceFiles

_MODES: Final[tuple[Mode, ...]] = get_args(Mode)
OPTIONS: Final[Mapping[str, Mode]] = {"last": "lasttoken", "mean": "mean", "cls": "cls"}
"""Values of `--pooling`."""


def sentence_files(
    folder: ModelFolder, *, causal: bool, pooling: str = "auto", normalize: bool | None = None
) -> SentenceFiles:
    """What the folder's files say, and where they say nothing or the options say otherwise, the options.

    Args:
        folder: the checkpoint.
        causal: whether its tokens see earlier ones alone, so that the last one is pooled by default.
        pooling: `--pooling`.
        normalize: `--normalize`; None: as the files say.

    Raises:
        ModelError: a file cannot be read.
    """
    found = SentenceFiles(("lasttoken",) if causal else ("mean",))
    if not folder.is_gguf and (folder.path / "modules.json").is_file():
        found = _read(folder.path, found)
    if pooling != "auto":
        found = replace(found, modes=(OPTIONS[pooling],))
    return found if normalize is None else replace(found, normalize=normalize)


def _read(folder: Path, found: SentenceFiles) -> SentenceFiles:
    digest = hashlib.sha256()

    def read(name: str, kind: type = dict) -> Any:
        """Contents of a file; empty if it is missing."""
        file = folder / name
        if not file.is_file():
            return kind()
        try:
            raw = file_content(file)
            value = read_json(raw)
        except OSError as error:
            raise ModelError(f"Cannot read {file}: {error.strerror or error}. Check its permissions.") from None
        except ForeignTextError as error:
            raise ModelError(f"{file} {error}. Copy the file again.") from None
        items: Any = value if kind is list and isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
            raise ModelError(f"{file} does not hold what sentence-transformers writes. Copy the file again.")
        digest.update(json.dumps([name, len(raw)]).encode() + raw)
        return value

    for module in read("modules.json", list):
        kind, path = str(module.get("type")).rpartition(".")[2], str(module.get("path") or "")
        about = read(f"{path}/config.json") if kind in ("Pooling", "Dense") else {}
        unsupported: str | None = None
        if kind == "Transformer" and not path:
            about = read("sentence_bert_config.json")
            longest, lower = about.get("max_seq_length"), about.get("do_lower_case") is True
            found = replace(found, longest=longest if type(longest) is int else None, lower=lower)
        elif kind == "Transformer":
            unsupported = f"a model in the folder {path}"
        elif kind == "Pooling":
            ends = ("", "_token", "_tokens")
            old = [mode for mode in _MODES if any(about.get(f"pooling_mode_{mode}{end}") for end in ends)]
            named: Any = about.get("pooling_mode") or old or "mean"
            modes: Any = (named,) if isinstance(named, str) else tuple(named)
            odd = next((mode for mode in modes if mode not in _MODES), None)
            unsupported = odd and f"the pooling {odd}"
            found = replace(found, modes=modes, pools_prompt=about.get("include_prompt") is not False)
        elif kind == "Dense":
            name, size = str(about.get("activation_function", "Tanh")).rpartition(".")[2], about.get("out_features")
            plain = about.get("module_input_name", "sentence_embedding") == "sentence_embedding"
            if type(size) is int and plain and not about.get("use_residual"):
                found = replace(found, dense=(*found.dense, (folder / path, size, name)))
            else:
                unsupported = f"the settings of {path}/config.json"
        elif kind == "Normalize":
            found = replace(found, normalize=True)
        elif kind != "Dropout":
            unsupported = f"the module {kind}"
        found = replace(found, unsupported=found.unsupported or unsupported)
    about = read("config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (about.get("prompts") or {}).items()}
    default = about.get("default_prompt_name")
    default = default if default in prompts else None
    return replace(found, prompts=prompts, default_prompt=default, digest=digest.hexdigest())


def head_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Labels of a checkpoint's classification head, in order; empty without one."""
    if not has_scores(config):
        return ()
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return tuple(str(label) for _, label in sorted(named.items(), key=lambda item: int(item[0])))
    count = config.get("num_labels")
    return tuple(f"LABEL_{i}" for i in range(count if type(count) is int else 2))
