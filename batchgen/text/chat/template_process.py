"""Process that renders chat templates, separate from the run; its main function is `serve`.

A template is a program: it may loop for hours, or make a text that fills the memory. So the templates of a model run in
the library's sandbox in this process, each text under limits of processor time and memory. Several are rendered at a
time; where one exceeds a limit, which ends the process, the others are rendered in another one. A run whose model
folder names no template never starts it.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn

from batchgen.errors import BatchgenError
from batchgen.request.foreign_text import read_json
from batchgen.text.helper_process import HelperProcess, SharedProcess, begin, limit_memory, limit_seconds

CLOCK: Final = "strftime_now"
"""Name of the function by which templates read the time."""
ROW: Final = "row"
"""Name of the variable by which a prompt template reads all fields of a row."""
_MODULE: Final = "transformers.utils.chat_template_utils"
_MAX_TEMPLATES: Final = 16
"""Most compiled templates that are kept."""
_WIDTH: Final = 8  # bytes of the number of a text
_MAX_REASON: Final = 2000
"""Most characters of an error's message."""
_ADDRESS: Final = re.compile(r"[^\n]{0,60}( at 0x[0-9a-f]{6,16}>)")
"""How Python shows what has no text: a method, a generator, an object. The group is the address."""


class TemplateFailure(Exception):
    """An error that a template raises, or the library about it.

    Attributes:
        kind: name of the error's class.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.kind, str(self))


class ChanceError(ValueError):
    """A template draws at random."""


class OverLimit(BaseException):
    """A template exceeds its limits; no `Exception`, so that it is not taken for an error that it raises."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits for rendering one text."""

    seconds: float = 5
    """Processor time in seconds."""
    memory: int = 1 << 30
    """Bytes of memory while rendering."""
    characters: int = 1 << 26
    """Most characters of the text."""


class Rendering(NamedTuple):
    """A text to render."""

    source: str
    """Source of the template."""
    variables: Mapping[str, Any]
    """Plain JSON values that the template sees."""
    of_fields: bool = False
    """Whether it is a prompt template, whose variables are fields, and not a chat template."""


class TemplateReads(NamedTuple):
    """What the source of a template names; nothing if it cannot be parsed, which rendering reports."""

    variables: frozenset[str] = frozenset()
    """Variables that it reads and does not set."""
    constants: frozenset[str] = frozenset()
    """Texts, and numbers as text, that it names."""
    clock_formats: frozenset[str] | None = frozenset()
    """Formats in which it prints the time; None if one of them is computed."""


class _Job(NamedTuple):
    renderings: Sequence[Rendering]
    clock: datetime
    limits: RenderLimits


def serve(source: int, sink: int, progress: int) -> None:
    """Receive jobs and sources of templates, and send their results, until the other side closes.

    Args:
        source: descriptor of the pipe from which `_Job`s and sources are received.
        sink: descriptor of the pipe to which a list of texts or errors is sent for each job, or what a source names.
        progress: descriptor of the file for the number of the text that is being rendered.
    """
    (requests, results), current = begin(source, sink), mmap(progress, _WIDTH)
    _library()  # before there is a limit
    templates: dict[tuple[str, bool], Any] = {}
    while True:
        try:
            job: _Job | str = requests.recv()
        except EOFError:
            return
        if isinstance(job, str):
            results.send(_reads(job))
            continue
        limit_memory(job.limits.memory)
        texts = []
        for number, rendering in enumerate(job.renderings):
            current[:] = number.to_bytes(_WIDTH)
            limit_seconds(job.limits.seconds)
            texts.append(_render(rendering, job, templates))
        limit_seconds(0)
        limit_memory(None)
        results.send(texts)


def _render(
    rendering: Rendering, job: _Job, templates: dict[tuple[str, bool], Any]
) -> str | TemplateFailure | OverLimit:
    try:
        key = rendering.source, rendering.of_fields
        template = templates.get(key)
        if template is None:
            if len(templates) >= _MAX_TEMPLATES:
                templates.clear()
            template = templates[key] = _compile(*key)
        own = {"lipsum": _refuse_chance} | ({} if rendering.of_fields else {CLOCK: job.clock.strftime})
        text = str(template.render({**own, **rendering.variables}))
        if len(text) > job.limits.characters:
            return _over(f"makes more than {job.limits.characters} characters")
        if " at 0x" in text:
            _check_addresses(text, rendering.variables)
        return text
    except MemoryError:
        return _no_memory(job.limits)
    except Exception as error:  # a template may raise anything about any message
        return TemplateFailure(type(error).__name__, str(error)[:_MAX_REASON])


def _reads(source: str) -> TemplateReads:
    """What a template names, from its syntax tree."""
    from jinja2 import meta, nodes

    try:  # the library's sandbox is that of an empty template: to compile another one may compute its constants
        tree = _library()._compile_jinja_template("").environment.parse(source)
    except Exception:  # of the parser, or of a template nested too deep for it
        return TemplateReads()
    constants = (node.value for node in tree.find_all(nodes.Const) if not isinstance(node.value, bool))
    named = sum(node.name == CLOCK for node in tree.find_all(nodes.Name))
    tested = sum(getattr(test.node, "name", None) == CLOCK for test in tree.find_all(nodes.Test))
    formats = [
        call.args[0].value if len(call.args) == 1 and isinstance(call.args[0], nodes.Const) else None
        for call in tree.find_all(nodes.Call)
        if getattr(call.node, "name", None) == CLOCK
    ]
    known = None not in formats and len(formats) + tested == named  # else it may be called under another name
    variables = frozenset(meta.find_undeclared_variables(tree))
    return TemplateReads(variables, frozenset(map(str, constants)), frozenset(map(str, formats)) if known else None)


def _compile(source: str, of_fields: bool) -> Any:
    if re.search(r"\|\s*random\b", source):
        _refuse_chance()
    return _of_fields().from_string(source) if of_fields else _library()._compile_jinja_template(source)


@cache
def _of_fields() -> Any:
    """The environment of prompt templates: the sandbox of chat templates, in which nothing that is missing is printed.

    What is undefined is false in a condition, and `default` replaces it.
    """
    from jinja2 import StrictUndefined

    class Missing(StrictUndefined):
        __slots__ = ()

        @property
        def _undefined_message(self) -> str:
            missing = f"`{self._undefined_name}` is null or missing; where it may be, write {{{{ NAME or '' }}}}"
            return self._undefined_hint or missing

        def __bool__(self) -> bool:  # type: ignore[override]
            return False

    def printed(value: Any) -> Any:
        if value is None or isinstance(value, bytes):
            raise ValueError(f"it prints {'a null value' if value is None else 'bytes'}")
        return value

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(str(value) if isinstance(value, Missing) else value, ensure_ascii=False, indent=indent)

    environment = _library()._compile_jinja_template("").environment.overlay(undefined=Missing, finalize=printed)
    environment.globals = {name: value for name, value in environment.globals.items() if name != CLOCK}
    environment.filters |= {"tojson": to_json, "fromjson": read_json}
    environment.tests["none"] = lambda value: value is None or isinstance(value, Missing)
    return environment


@cache
def _library() -> Any:
    """The library's module of chat templates, without the rest of the library, which takes longer to import."""
    spec = find_spec("transformers")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    packages = {"transformers": folder, "transformers.utils": folder / "utils"}
    for name, path in packages.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    try:
        return import_module(_MODULE)
    except Exception:  # another version needs more of it
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return import_module(_MODULE)


def _refuse_chance(*_: object) -> NoReturn:
    raise ChanceError("the template draws at random, so equal rows would give different prompts")


def _check_addresses(text: str, variables: Mapping[str, Any]) -> None:
    """Refuse a text with an address in memory that the row did not give: it would be another one in each run."""
    own = "\n".join(_texts(variables))
    for shown in _ADDRESS.finditer(text):
        if shown[1] not in own:
            raise ValueError(
                f"the template prints an object, with another address in each run: {shown[0].replace(shown[1], '>')}"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _over(problem: str) -> OverLimit:
    return OverLimit(f"the template {problem} for this row; shorten it")


def _no_memory(limits: RenderLimits) -> OverLimit:
    return _over(f"needs more than {limits.memory >> 20} MiB of memory")


class _Renderer(HelperProcess):
    def __init__(self) -> None:
        with TemporaryFile() as file:
            file.truncate(_WIDTH)
            super().__init__(__name__, file.fileno(), files=(file.fileno(),))
            self.current = mmap(file.fileno(), _WIDTH)


PROCESS: Final = SharedProcess(_Renderer)
"""The process that renders."""


def start_early(folder: Path) -> None:
    """Start the process, which takes a while to import the library, if a model folder seems to have templates."""
    config = folder / "tokenizer_config.json"
    with suppress(OSError), PROCESS.lock:
        if any(folder.glob("chat_template*")) or b'"chat_template"' in config.read_bytes():
            PROCESS.running()


@lru_cache(maxsize=8)
def template_reads(source: str) -> TemplateReads:
    """What a template names."""
    with PROCESS.lock:
        process = PROCESS.running()
        try:
            process.requests.send(source)
            reads: TemplateReads = process.results.recv()
            return reads
        except (EOFError, OSError):
            PROCESS.stop()
            return TemplateReads()
        except BaseException:
            PROCESS.stop()  # discard its pending results
            raise


def render_templates(
    renderings: Sequence[Rendering], clock: datetime, limits: RenderLimits
) -> list[str | TemplateFailure | OverLimit]:
    """The text of each rendering, or its error. `clock` is the time that templates see.

    Raises:
        BatchgenError: the process could not be started, or ended without reaching a limit.
    """
    with PROCESS.lock:
        process = PROCESS.running()
        try:
            process.current[:] = bytes(_WIDTH)
            process.requests.send(_Job(renderings, clock, limits))
            texts: list[str | TemplateFailure | OverLimit] = process.results.recv()
            return texts
        except (EOFError, OSError):
            code, at = process.exit_code(), int.from_bytes(process.current[:])
            PROCESS.stop()
        except BaseException:
            PROCESS.stop()  # discard its pending results
            raise
    is_known = len(renderings) == 1 or -code == signal.SIGPROF  # else other texts may have used the memory
    ended = _death(code, limits) if is_known else render_templates(renderings[at : at + 1], clock, limits)[0]
    before = render_templates(renderings[:at], clock, limits) if at else []
    after = render_templates(renderings[at + 1 :], clock, limits) if at + 1 < len(renderings) else []
    return [*before, ended, *after]


def _death(code: int, limits: RenderLimits) -> OverLimit:
    """The error of the text at which the process ended."""
    if code >= 0:
        raise BatchgenError("the process that renders chat templates ended; check that transformers is installed")
    return _over(f"takes more than {limits.seconds:g} seconds") if -code == signal.SIGPROF else _no_memory(limits)
