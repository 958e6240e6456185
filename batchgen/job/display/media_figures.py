"""Figures of a job's images and sounds, for reports and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from batchgen.request.fields.media_items import MediaPlan

MEDIA_COUNTS: Final = "media_"
"""Beginning of the names of the engine's counts of items, which go on through all runs of a job."""


_OF_FOOTER: Final = (*(each.name for each in fields(MediaPlan)), "encoded", "reused")


def media_figures(plan: Mapping[str, Any] | None, engine: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """The report's figures of images and sounds; None for a job without any.

    Args:
        plan: the fields of the job's `MediaPlan`.
        engine: what its run counted.
        device: type of the model's device; `device_busy` is None unless it is "cpu", whose time is known.
    """
    if plan is None:
        return None
    busy = engine["compute_ms"] + engine["overlapped_compute_ms"]
    total = engine["compute_ms"] + engine["host_ms"]
    counts = {name.removeprefix(MEDIA_COUNTS): count for name, count in engine.items() if name.startswith(MEDIA_COUNTS)}
    share = round(min(1.0, busy / total), 4) if device == "cpu" and total else None
    return {**plan, **counts, "device_busy": share}


def media_facts(media: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the footer has of the report's figures, as "media"; nothing for a job without images and sounds."""
    return {} if media is None else {"media": {name: media[name] for name in _OF_FOOTER}}


def media_size(media: Mapping[str, Any]) -> str:
    """`3 distinct images (1.2 megapixels), 1 distinct sound (4.0 s)`."""
    parts = []
    if media["images"]:
        parts.append(f"{_counted(media['images'], 'image')} ({_rounded(media['megapixels'])} megapixels)")
    if media["sounds"]:
        parts.append(f"{_counted(media['sounds'], 'sound')} ({media['audio_seconds']:,.1f} s)")
    return ", ".join(parts)


def _rounded(amount: float) -> str:
    """With one decimal place, or two digits that count if it is small."""
    return f"{amount:,.1f}" if amount >= 1 else f"{amount:.2g}"


def media_line(media: Mapping[str, Any]) -> str:
    """What a run did with its items, in a line."""
    done = f"and {media['reused']:,} reused, of" if media["reused"] else "to"
    text = f"{media_size(media)}, {media['encoded']:,} encoded {done} {media['encoded_tokens']:,} tokens"
    busy = media["device_busy"]
    return text if busy is None else f"{text}; model busy {busy:.0%} of the time"


def _counted(count: int, word: str) -> str:
    return f"{count:,} distinct {word}" + ("" if count == 1 else "s")
