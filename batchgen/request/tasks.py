"""Rows that return vectors or scores instead of text, and what a checkpoint offers for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import error_at, invalid
from batchgen.request.fields.hidden_states import HiddenStates, StatePool
from batchgen.request.fields.params import Task

Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How states become one, by the names of sentence-transformers."""


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """How a folder's embeddings are made."""

    modes: tuple[Mode, ...]
    """Their results follow one another."""
    dense: tuple[tuple[Path, int, str], ...] = ()
    """(folder, output size, class of `torch.nn` behind it) of linear layers behind the pooling."""
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text in front of the texts of embed rows."""
    default_prompt: str | None = None
    """Name of the prompt of rows that name none."""
    pools_prompt: bool = True
    """Whether the tokens of a prompt's text are pooled as well."""
    longest: int | None = None
    """Most tokens of a text; None: those of the model."""
    lower: bool = False
    """Whether texts are written in small letters."""
    unsupported: str | None = None
    """A module that is not known here."""
    digest: str | None = None
    """sha256 of the files; None: there are none."""


@dataclass(frozen=True, slots=True)
class TaskSupport:
    """What a checkpoint offers for rows with a task."""

    model: str = "model"
    """Its `model_type`, for messages."""
    generates: bool = True
    """Whether it has a language head."""
    hidden: int = 0
    """Numbers of a state."""
    files: SentenceFiles = SentenceFiles(("lasttoken",))
    labels: tuple[str, ...] = ()
    """Labels of the classification head, in order; empty: there is no head."""
    scores: StatePool = "last"
    """The states that the classification head reads."""
    separator: int | None = None
    """Id of the token behind a query, from which on tokens have another type; None: types do not differ."""

    @property
    def size(self) -> int:
        """Numbers of an embedding."""
        return self.files.dense[-1][1] if self.files.dense else self.hidden * len(self.files.modes)

    def states(self, task: Task) -> HiddenStates:
        """The states that a task reads: already pooled, where the collector of states can."""
        modes = self.files.modes
        pools: dict[tuple[Mode, ...], StatePool] = {("cls",): "first", ("lasttoken",): "last"}
        embeds = "mean" if set(modes) <= {"mean", "mean_sqrt_len_tokens"} else pools.get(modes, "none")
        return HiddenStates(tokens="prompt", pool=embeds if task == "embed" else self.scores)

    def prompt(self, name: str | None) -> str:
        """The text in front of a row's texts.

        Raises:
            RowError: `invalid_field`: there is none of this name.
        """
        name, prompts = self.files.default_prompt if name is None else name, self.files.prompts
        if name is not None and name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise invalid("prompt_name", f"is {name[:60]!r}, and the prompts of this checkpoint are: {known}")
        if name is not None and prompts[name] and not self.files.pools_prompt:
            problem = "needs pooling without the tokens of the prompt (`include_prompt`), which is not supported"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, "prompt_name", f"{problem}; use another checkpoint")
        return "" if name is None else prompts[name]

    def check(self, task: Task | None, dimensions: int | None) -> None:
        """Check that the checkpoint can do what a row asks for; no task is to generate or score text.

        Raises:
            RowError: `unsupported_field` or `invalid_field`.
        """
        if task is None and not self.generates:
            offers = "`embed: true`" + (", `classify: true` or `query` and `documents`" if self.labels else "")
            problem = f"must be true: a {self.model} checkpoint without a language head writes no text; give rows"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, "embed", f"{problem} {offers}, or run with --embed")
        if task == "embed" and self.files.unsupported:
            problem = f"is not supported for this checkpoint, whose modules.json names {self.files.unsupported}"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, "embed", f"{problem}; use another one")
        if task == "embed" and dimensions is not None and dimensions > self.size:
            raise invalid("dimensions", f"must be at most {self.size}, the size of the embeddings, got {dimensions}")
        if task in ("classify", "rerank") and not self.labels:
            problem = "needs a checkpoint with a classification head (ForSequenceClassification), which this one is not"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, _field_of(task), f"{problem}; use such a checkpoint")
        if task == "rerank" and len(self.labels) > 1:
            problem = f"needs a checkpoint that scores one label, and this one has {len(self.labels)}"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, "documents", f"{problem}; classify with `classify: true`")


def _field_of(task: Task) -> str:
    return "documents" if task == "rerank" else task


def refuse_with_task(name: str, task: Task | Literal["completion", "completions"]) -> RowError:
    """The error of a field that has no effect on a row with a task or with texts to score."""
    source = {"embed": "embed: true", "classify": "classify: true", "rerank": "documents"}.get(task, task)
    what = "is scored without sampling" if source == task else "generates nothing"
    return invalid(name, f"has no effect with `{source}`, which {what}; remove it")
