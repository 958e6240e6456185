"""Rows that are scored, not continued: a prompt with `completion` or `completions`.

They draw nothing, so a field that says how to draw, when to end or what to return beside scores would be ignored; a row
that asks for anything by one is refused. Run-wide defaults are meant for other rows and do not reach these.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from batchgen.checks import invalid
from batchgen.params import SamplingParams
from batchgen.row_values import RowValues

__all__ = ["scoring_params", "texts_to_score"]

_MEANINGFUL = frozenset({"lora_path"})
_DEFAULTS: dict[str, Any] = {
    **{item.name: item.default for item in fields(SamplingParams)},
    "max_new_tokens": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}


def texts_to_score(row: RowValues) -> tuple[str | tuple[int, ...], ...]:
    """The row's completions; empty for a row that generates.

    Raises:
        RowError: `invalid_field` for both spellings, and for a field that means nothing beside them.
    """
    if "completions" in row.values and "completion" in row.values:
        raise invalid("completions", "is given beside `completion`; keep one of them")
    one, several = row.values.get("completion"), row.values.get("completions")
    texts: tuple[str | tuple[int, ...], ...] = several or (() if one is None else (one,))
    if not texts:
        return ()
    source = "completion" if one is not None else "completions"
    for name, spelled in row.spelled.items():
        if name in _DEFAULTS and name not in _MEANINGFUL and not _asks_for_nothing(name, row.values[name]):
            raise invalid(spelled, f"means nothing beside `{source}`: that text is scored, nothing is drawn; remove it")
    return texts


def scoring_params(params: SamplingParams) -> SamplingParams:
    """What of a row's parameters counts where its texts are scored."""
    return _scoring(params.lora_path)


@cache  # by adapter, of which a run has a few: the rows of one share an object
def _scoring(lora_path: str | None) -> SamplingParams:
    return SamplingParams(max_new_tokens=0, temperature=0.0, lora_path=lora_path)


def _asks_for_nothing(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    if type(value) is bool or type(default) is bool:
        return value is default or (value is False and default is None)
    return bool(value == default) or value in ((), {}, "")
