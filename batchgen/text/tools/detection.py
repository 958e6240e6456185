"""The format in which a model calls tools, found by the call that its chat template writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from batchgen.text.calls import ToolCall, ToolFormat
from batchgen.text.chat.template_probe import CALL, Written
from batchgen.text.tools.formats import FORMATS

_DESCRIBED: Final = (
    ("xlam", "Salesforce xLAM"),
    ("command_r", "Action: ```json"),
    ("command_r", "Action:```json"),
    ("functionary", "<function=example_function_name>{"),
    ("pythonic", "[func_name1("),
    ("pythonic", "[func_name("),
    ("pythonic", "[func1("),
    ("llama3_json", '"parameters": dictionary'),
)
"""Words with which a prompt describes a format, for templates that write no calls."""
_ENOUGH: Final = 0.5
"""Share of a format's markers from which on it is the model's."""
_SCHEMAS: Final = {CALL.name: {name: {"type": "string"} for name in CALL.arguments}}


def format_of(written: Written, special: Sequence[str]) -> str | None:
    """Name of the format in which a model calls tools; None if its template writes calls in no known one.

    A format is the model's if it reads the call that the template writes. Of several, it is the one that writes the
    same text, or most of it. Where no call can be read, it is the one whose example or markers the template writes.

    Args:
        written: what the template writes.
        special: special tokens, one of which may end an output.
    """
    call, text = written.call or "", written.tools + (written.call or "")
    found = [name for name, form in FORMATS.items() if _reads(form, written, special)]
    if found:
        return max(found, key=lambda name: _likeness(FORMATS[name], call, CALL))
    shown = [name for name, form in FORMATS.items() if _shows(form, text)]
    marked = max(FORMATS, key=lambda name: _markers(FORMATS[name], text))
    if shown or _markers(FORMATS[marked], text) >= _ENOUGH:
        return next(iter(shown), marked)
    return next((name for name, words in _DESCRIBED if words in text), None)


def _markers(form: ToolFormat, text: str) -> float:
    """The share of a format's texts around names and values that is in a text; 0 without the first of them."""
    around = re.split("|".join((CALL.name, *CALL.arguments, *CALL.arguments.values())), form.write([CALL]))
    bare, *pieces = (re.sub(r"[\s\"']", "", each) for each in (text, *around))  # examples have names without quotes
    return 0 if form.whole or pieces[0] not in bare else sum(piece in bare for piece in pieces) / len(pieces)


def _shows(form: ToolFormat, text: str) -> bool:
    """Whether a text has a call as the format writes it, which is an example where nothing is called."""
    calls = [] if form.whole else [call for span in form.own_spans(text, {}) for call in span.calls]
    return any(_likeness(form, text, call)[1] for call in calls)


def _reads(form: ToolFormat, written: Written, special: Sequence[str]) -> bool:
    if written.call is None:
        return False
    texts = _outputs(written, special) if form.whole else [written.call]
    calls = [call for text in texts for span in form.own_spans(text, _SCHEMAS) for call in span.calls]
    return any(call._replace(id=None) == CALL for call in calls)


def _outputs(written: Written, special: Sequence[str]) -> Iterator[str]:
    """What may be the whole output of the model in a turn with a call."""
    assert written.call is not None
    before, after = written.answer
    if not written.call.startswith(before.rstrip()):
        return
    output = written.call[len(before.rstrip()) :]
    ends = [text for text in (after.strip(), *special) if text]
    yield output
    for end in re.finditer("|".join(map(re.escape, ends)) or "(?!)", output):
        yield output[: end.start()]


def _likeness(form: ToolFormat, text: str, call: ToolCall) -> tuple[bool, bool, int]:
    """How much of a text a format writes for a call in it: with the same blanks, or with others."""
    own = form.write([call]).strip()
    bare = "".join(own.split())
    same = bare in "".join(text.split())
    return own in text, same, len(bare) if same else -form.whole
