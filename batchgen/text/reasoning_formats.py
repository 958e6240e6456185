"""How model families write their thoughts: the table of formats, and which of them a model has.

A model is known by the response template of its tokenizer, if it has one, else by its chat template and its vocabulary.
Families that write alike have the same markers under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from batchgen.errors import UsageError

AUTO: Final = "auto"
OFF: Final = "off"
FROM_TEMPLATE: Final = "response_template"
"""Name of a format that the tokenizer's response template gives."""


class ReasoningFormat(NamedTuple):
    """The markers around thoughts. They belong neither to the thoughts nor to the answer."""

    name: str
    starts: tuple[str, ...]
    """Begin the thoughts, while nothing but blanks is written; in a format of channels also later."""
    ends: tuple[str, ...]
    """End the thoughts. The first one is written when a budget is spent."""
    answers: tuple[str, ...] = ()
    """Begin the answer behind the thoughts."""
    closers: tuple[str, ...] = ()
    """End the answer."""
    header: str | None = None
    """For a format of channels, in which thoughts and answers may alternate: the text between two of them."""
    opened: bool = False
    """Whether outputs begin with thoughts where the prompt says nothing: for a model named by the user."""

    @property
    def close(self) -> str:
        """The text that ends the thoughts and begins the answer."""
        return self.ends[0] if self.header is None else f"{self.ends[0]}{self.header}{self.answers[0]}"

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.starts, *self.ends, *self.answers, *self.closers)


class _Family(NamedTuple):
    name: str
    format: ReasoningFormat
    spelled: tuple[str, ...]
    """Texts of which one is in its chat template, or which all are added tokens of its vocabulary."""
    tells: tuple[str, ...] = ()
    """Texts that it has in its chat template."""


def _tags(tag: str, *tells: str, name: str, answer: str | None = None, opened: bool = False) -> _Family:
    ends = (f"</{tag}>",)
    around = () if answer is None else (f"<{answer}>",)
    behind = () if answer is None else (f"</{answer}>",)
    return _Family(
        name, ReasoningFormat(name, (f"<{tag}>",), ends, around, behind, opened=opened), (f"<{tag}>", *ends), tells
    )


def _sentences(name: str, *tells: str) -> _Family:
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
    return _Family(name, ReasoningFormat(name, starts, ends), (), tells)


_CHANNEL: Final = "<|channel|>"
_FAMILIES: Final = (
    _Family(
        "gpt_oss",
        ReasoningFormat(
            "gpt_oss",
            (f"{_CHANNEL}analysis<|message|>",),
            ("<|end|>",),
            (f"{_CHANNEL}final<|message|>", f"{_CHANNEL}commentary<|message|>"),
            header="<|start|>assistant",
        ),
        (_CHANNEL, "<|message|>", "<|start|>"),
    ),
    _Family("gemma4", ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",)), ("<|channel>", "<channel|>")),
    _Family("mistral", ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)), ("[THINK]", "[/THINK]")),
    _Family(
        "cohere",
        ReasoningFormat(
            "cohere",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            ("<|START_RESPONSE|>",),
            ("<|END_RESPONSE|>",),
        ),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    _tags("seed:think", name="seed_oss"),
    _tags("thought", "[|assistant|]", name="exaone_deep"),
    _sentences("granite_sentences", "Here is my thought process:", "Here is my response:"),
    _tags("think", "<response>", "<|start_of_role|>", name="granite", answer="response"),
    _tags("think", "<response>", name="ernie45", answer="response"),
    _tags("think", "<answer>", name="hunyuan", answer="answer"),
    _tags("think", "<|im_middle|>", name="kimi_k2"),
    _tags("think", "]~b]ai", name="minimax_m2", opened=True),
    _tags("think", "<｜Assistant｜>", name="deepseek_r1", opened=True),
    _tags("think", "[gMASK]", name="glm45"),
    _tags("think", "<|im_sep|>", name="phi4"),
    _tags("think", "[|assistant|]", name="exaone"),
    _tags("think", "<SPECIAL_10>", name="nemotron"),
    _tags("think", "detailed thinking", name="nemotron"),
    _tags("think", "/no_think", "<|im_start|>", name="smollm3"),
    _tags("think", "<|im_start|>", "enable_thinking", name="qwen3"),
    _tags("think", "<|im_start|>", name="qwq", opened=True),
    _tags("think", name="think"),
)
"""In order: the first family all of whose tells a model has."""

MARKERS: Final = tuple(
    dict.fromkeys((start, end) for family in _FAMILIES for start in family.format.starts for end in family.format.ends)
)
"""Pairs of markers that begin and end thoughts in a family."""

NAMES: Final = tuple(dict.fromkeys(family.name for family in _FAMILIES))
"""Names of the families, for the option `--reasoning`."""


def find_format(
    wanted: str,
    response_template: Mapping[str, Any] | None,
    templates: Sequence[str],
    is_added: Callable[[str], bool],
) -> ReasoningFormat | None:
    """The format in which a model writes its thoughts; None if it has none that is known, or with `off`.

    Args:
        wanted: value of the option `--reasoning`.
        response_template: the one of the tokenizer, if it has one.
        templates: sources of the model's chat templates.
        is_added: whether a text is an added token of the vocabulary.

    Raises:
        UsageError: no family has the name.
    """
    if wanted == OFF:
        return None
    if wanted != AUTO:
        named = next((family.format for family in _FAMILIES if family.name == wanted), None)
        if named is None:
            raise UsageError(f"`--reasoning` must be {AUTO}, {OFF} or one of {', '.join(NAMES)}, got {wanted!r}")
        return named
    found = None if response_template is None else _from_template(response_template)
    if found is not None:
        return found
    source = "\n".join(templates)
    for family in _FAMILIES:
        known = all(text in source for text in family.tells)
        spelled = any(text in source for text in family.spelled) or all(map(is_added, family.spelled))
        if known and (spelled or not family.spelled):
            return family.format._replace(opened=False)
    return None


def _from_template(template: Mapping[str, Any]) -> ReasoningFormat | None:
    """The markers that a response template of the library names as texts; None if it has none, or patterns."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping):
        return None
    names = ("thinking", "reasoning", "reasoning_content")
    thoughts = next((fields[name] for name in names if isinstance(fields.get(name), Mapping)), None)
    if thoughts is None:
        return None
    starts, ends = _texts(thoughts.get("open")), _texts(thoughts.get("close"))
    if not starts or not ends:
        return None
    content = fields.get("content")
    content = content if isinstance(content, Mapping) else {}
    if "open_pattern" in content or "close_pattern" in content:
        return None
    answers = _texts(content.get("open"))
    # An answer that begins with a marker, too, is one of the parts of an output of channels.
    headers = _texts(template.get("start_anchor")) if answers else ()
    closers = () if headers else _texts(content.get("close"))
    return ReasoningFormat(FROM_TEMPLATE, starts, ends, answers, closers, headers[0] if headers else None)


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
        return ()
    return tuple(values)
