"""JSON files of a model folder, and the class of the tokenizer that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.request.foreign_text import ForeignTextError, read_json_file, typed


def plain_config(folder: Path) -> Any:
    """Minimal model configuration with which transformers chooses the tokenizer's class.

    Without a configuration the library builds the one of the model type, which imports slow modules. None if
    tokenizer_config.json does not name the class, or custom code takes part in the choice.
    """
    from transformers import PreTrainedConfig  # as in `Tokenizer.load`

    tokenizer, model = _json_object(folder / "tokenizer_config.json"), _json_object(folder / "config.json")
    if not isinstance(tokenizer.get("tokenizer_class"), str) or "auto_map" in tokenizer:
        return None
    if not isinstance(model.get("model_type"), str) or "auto_map" in model:
        return None
    kept = {key: model[key] for key in ("model_type", "model_name", "tokenizer_class") if key in model}
    return PreTrainedConfig(name_or_path=str(folder), **kept)


def is_undescribed(folder: Path) -> bool:
    """Whether no file of a folder says which class its tokenizer has, and its model is none of a known type."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if "tokenizer_class" in _json_object(folder / "tokenizer_config.json"):
        return False
    model = _json_object(folder / "config.json")
    return "tokenizer_class" not in model and TOKENIZER_MAPPING_NAMES.get(model.get("model_type")) != "GPT2Tokenizer"


def _json_object(path: Path) -> dict[str, Any]:
    """JSON object in a file; {} if the file is missing or damaged, which the library reports when it loads."""
    try:
        value = read_json_file(path)
    except (OSError, ForeignTextError):
        return {}
    return value if isinstance(value, dict) else {}


def read_object(path: Path) -> dict[str, Any]:
    """JSON object in a file of the model; {} if the file is missing.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        return typed(read_json_file(path), {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path.name} of the model cannot be read ({error}); fetch the model again") from None
    except ForeignTextError as error:
        raise ModelError(f"{path.name} of the model {error}; fetch the model again") from None
