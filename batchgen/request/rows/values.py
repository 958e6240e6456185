"""Field collection shared by native rows and OpenAI bodies: run-wide defaults and construction of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.request.checks import check_unicode, error_at, invalid, show
from batchgen.request.fields.declared import CONSTRAINTS, Place
from batchgen.request.fields.field_checks import DTYPE_PATTERNS
from batchgen.request.fields.params import PARAMETERS, SamplingParams, Task
from batchgen.request.fields.prompts import ChatPrompt
from batchgen.request.fields.tool_choice import AUTO
from batchgen.request.json_text import text_remedy
from batchgen.request.rows.layout import CHAT_FIELDS, Kind, Layout, new_layout
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.unknown_keys import CarriedOptions, unknown_field

_LOGPROB_FIELDS: tuple[tuple[str, Any], ...] = (
    ("logprob_start_len", -1),
    ("token_ids_logprob", ()),
    ("return_text_in_logprobs", False),
)
"""Fields that select which logprobs are returned, each with the value that selects none."""
_PARAM_NAMES = frozenset(PARAMETERS)
_TASKS: tuple[Task, ...] = ("embed", "classify")
_HOW = ("dimensions", "prompt_name")
"""Parameters of rows to embed."""
_KEPT = ("lora_path", *_HOW)
_MAX_CACHED_PARAMS = 256
"""Most parameter sets in the cache of `RowDefaults`; most jobs use a few."""
_MAX_LAYOUTS = 256
_MAX_NAME_CHARS = 512
"""Most characters of field names in a cached layout."""


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """Run-wide defaults of rows.

    Precedence of a sampling value: row, `flags`, the endpoint's default (`max_new_tokens` of OpenAI lines), `model`,
    the defaults of `SamplingParams`.

    Raises:
        UsageError: a flag or model default is unknown or out of range.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields set on the command line or in the configuration."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields from the model's generation_config.json; empty under `--sampling-defaults openai`."""
    names: ModelNames = field(default_factory=ModelNames)
    """Names of the run's model, which a row's `model` must be."""
    adapters: frozenset[str] = frozenset()
    """Names of the run's LoRA adapters."""
    chat: bool | None = None
    """True: `text` is wrapped as a user message. False: `messages` are refused. None: both are accepted unchanged."""
    system: str | None = None
    """System message for conversations without one."""
    events: bool = False
    """Whether the run writes events, which rows with `stream` need."""
    processors: frozenset[str] = frozenset()
    """Names of the run's logit processors."""
    template_reads: Callable[[str], bool] = lambda name: False
    """Whether the model's chat template names a variable."""
    ignore_template_options: bool = False
    """Whether fields for the chat template that it does not read are ignored."""
    prompt_column: str | None = None
    """The field that the run reads prompts from, for errors."""
    carried_options: CarriedOptions = field(default_factory=CarriedOptions, repr=False, compare=False)
    """Counts carried keys that look like options, or refuses them."""
    seed: int | None = field(init=False, default=None)
    """The seed of rows without one, if the run sets it."""
    _layouts: dict[Hashable, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)
    _params: dict[Hashable, SamplingParams] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Parameter sets of earlier rows by the values that determine them, and by themselves: equal rows share one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", self.flags.get("seed"))
        for name, value in [*self.flags.items(), *self.model.items()]:
            if name not in _PARAM_NAMES:
                raise UsageError(f"`{name}` is not a sampling parameter; use one of {', '.join(sorted(_PARAM_NAMES))}")
            try:
                # Each value is checked alone: a minimum above the default maximum may fit a row's maximum.
                # `custom_params` is valid only with a processor.
                processor = self.flags.get("custom_logit_processor")
                SamplingParams(**{"max_new_tokens": None, "custom_logit_processor": processor, name: value})
            except RowError as error:
                raise UsageError(f"default sampling parameter {error}") from None

    def unused_logprob_options(self, params: Iterable[SamplingParams]) -> list[str]:
        """Run-wide logprob fields that have no effect because no row of the job returns logprobs."""
        selectors = [("top_logprobs_num", 0), *_LOGPROB_FIELDS]
        requested = [name for name, no_op in selectors if self.flags.get(name, no_op) != no_op]
        return [] if not requested or any(one.return_logprob for one in params) else requested

    def layout(self, kind: Kind, source: Mapping[str, Any]) -> Layout:
        """The layout of a mapping's keys; the layouts of common rows are cached."""
        key = (kind, tuple(source))
        layout = self._layouts.get(key)
        if layout is None:
            layout = new_layout(kind, key[1])
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            if sum(map(len, map(str, source))) <= _MAX_NAME_CHARS:
                self._layouts[key] = layout
        return layout

    def share(self, key: Hashable | None, params: SamplingParams) -> SamplingParams:
        """The shared set that equals `params`, found by `cached_params` under `key` from now on."""
        if len(self._params) >= _MAX_CACHED_PARAMS:
            self._params.clear()
        shared = self._params.setdefault(params, params)
        if key is not None:
            self._params[key] = shared
        return shared

    def cached_params(self, key: Hashable | None) -> SamplingParams | None:
        """The set that `share` was given with this key, if it is cached."""
        return self._params.get(key)


class RowValues:
    """Collected fields of one row: normalised values by canonical name."""

    __slots__ = ("extra", "spelled", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        """Canonical name -> the name the row uses."""
        self.extra: dict[str, Any] = {}
        """Unknown top-level keys, which are carried to the output."""

    def collect(self, layout: Layout, source: Mapping[str, Any], known_valid: bool = False) -> None:
        """Check and add every field of `source`, or those that do not determine its parameter set if it is known.

        A null value counts as absent.

        Raises:
            RowError: `invalid_field`, `unknown_field`, `invalid_unicode`, `token_out_of_range`, `unsupported_field`.
        """
        values, spelled = self.values, self.spelled
        for key, known in layout.others if known_valid else layout.fields:
            value = source[key]
            if known is None:
                self._add_unknown(key, value, layout.place)
            elif value is not None:
                ids = known.ids and type(value) is list and bool(value) and type(value[0]) in (int, list)
                if not ids and (type(value) is not str or not value.isascii()):
                    check_unicode(value, key)
                name = known.name
                if name in spelled:
                    other = spelled[name]
                    flat = "twice (flat and in `sampling_params`)"
                    where = flat if other == key else f"together with its alias `{other}`"
                    raise invalid(key, f"is given {where}; keep one of them")
                spelled[name] = key
                try:
                    values[name] = known.check(key, value)
                except RowError as error:
                    if ids:
                        check_unicode(value, key)
                    is_native = key == "messages" and layout.place == "row"
                    column = f", or run with --prompt-column {key}" if is_native else ""
                    raise text_remedy(error, known.check, key, value, column) from None

    def carry(self, layout: Layout, source: Mapping[str, Any]) -> None:
        """Add only the valid carried fields of `source`."""
        for entry in layout.fields:
            if entry[1] is None or entry[1].carried:
                with suppress(RowError):
                    self.collect(replace(layout, fields=(entry,)), source)

    def carried(self, layout: Layout) -> dict[str, Any]:
        """Fields that the row carries to the output: unknown ones, and the carried fields of a `layout` of a body."""
        body = {self.spelled[name]: self.values[name] for name in layout.carried if name in self.values}
        return {**self.extra, "body": body} if body else self.extra

    def _add_unknown(self, key: str, value: Any, place: Place) -> None:
        if type(key) is not str:  # possible from Python only
            raise RowError(ErrorCode.INVALID_JSON, f"field names must be strings, got {show(key)}")
        if not key.isascii():
            check_unicode(key, ascii(key)[1:-1])
        if type(value) is not str or not value.isascii():
            check_unicode(value, key)
        if place in ("row", "pairs"):
            self.extra[key] = value
        elif value is not None:
            raise unknown_field(key, place)

    def reject_unsupported(self, layout: Layout) -> None:
        """Refuse the first unsupported field whose value requests something.

        Raises:
            RowError: `unsupported_field`.
        """
        for known in layout.unsupported:
            if known.name in self.values and not known.requests_nothing(self.values[known.name]):
                problem = f"is not supported by this version; {known.remedy}"
                raise error_at(ErrorCode.UNSUPPORTED_FIELD, self.spelled[known.name], problem)

    def imply(self, name: str, value: Any, reason: str) -> None:
        """Set the field `name` as a consequence of the field `reason`, unless the row sets it."""
        if name not in self.spelled:
            self.values[name], self.spelled[name] = value, self.spelled[reason]

    @property
    def is_scoring(self) -> bool:
        """Whether the row scores texts and generates nothing."""
        return "completion" in self.values or "completions" in self.values

    def task(self, flags: Mapping[str, Any]) -> Task | None:
        """What the row asks for instead of text; its own fields come before the `flags` of the run.

        Raises:
            RowError: `invalid_field`: it asks for two things.
        """
        if "documents" in self.values:
            return "rerank"
        own = [name for name in _TASKS if self.values.get(name)]
        if len(own) > 1:
            raise invalid("classify", "cannot be combined with `embed`; keep one of them")
        if own or self.is_scoring:
            return own[0] if own else None
        return next((name for name in _TASKS if flags.get(name) and name not in self.values), None)

    def check_model(self, defaults: RowDefaults, params: SamplingParams) -> None:
        """Check that the run has the row's `model` and adapter.

        Raises:
            RowError: `unknown_adapter`, or `invalid_field` for another model or for two different adapters.
        """
        model, adapter = self.values.get("model"), params.lora_path
        is_known, adapter_of_model = defaults.names.split(model, defaults.adapters)
        if not is_known:
            raise defaults.names.refusal(model or "", adapters=defaults.adapters)
        if adapter_of_model is not None and adapter != adapter_of_model:
            problem = f"is {show(adapter)}, but `model` names the adapter {show(adapter_of_model)}; keep one"
            raise invalid("lora_path", problem)
        if adapter is not None and adapter not in defaults.adapters:
            field = "model" if adapter_of_model is not None else self.spelled.get("lora_path", "lora_path")
            known = ", ".join(sorted(defaults.adapters)) or "none"
            problem = f"names the adapter {show(adapter)}, but the adapters of this run are: {known}"
            raise error_at(ErrorCode.UNKNOWN_ADAPTER, field, f"{problem}; add it with --lora NAME=PATH")

    def params(self, defaults: RowDefaults, endpoint: Mapping[str, Any]) -> SamplingParams:
        """The row's parameter set, without its seed, merged with all defaults; `endpoint` has those of its endpoint.

        A scoring row, and one with a task, uses only the default adapter, and a row with `max_new_tokens: 0` ignores a
        default minimum.

        Raises:
            RowError: `invalid_field`, naming the field as the row spells it; `unknown_processor`.
        """
        merged, task = {**defaults.model, **endpoint, **defaults.flags}, self.task(defaults.flags)
        if self.is_scoring or task is not None:
            merged = {name: value for name, value in merged.items() if name in _KEPT}
        if self.values.get("max_new_tokens") == 0:
            merged.pop("min_new_tokens", None)
        merged.update((name, value) for name, value in self.values.items() if name in _PARAM_NAMES)
        merged["seed"] = None
        self._merge_logprobs(merged)
        self._merge_constraint(merged)
        adapter_of_model = defaults.names.split(self.values.get("model"), defaults.adapters)[1]
        if adapter_of_model is not None and "lora_path" not in self.values:
            merged["lora_path"] = adapter_of_model
        merged = self._with_task(merged, task)
        try:
            params = SamplingParams(**merged)
        except RowError as error:
            raise self._respelled(error) from None
        processor = params.custom_logit_processor
        if processor is not None and processor not in defaults.processors:
            available = ", ".join(sorted(defaults.processors)) or "none"
            problem = f"names {show(processor)}, but the processors of this run are: {available}"
            remedy = f"add it with --logit-processor {processor[:60]}=module:function"
            raise error_at(ErrorCode.UNKNOWN_PROCESSOR, "custom_logit_processor", f"{problem}; {remedy}")
        if params.stream and not defaults.events:
            remedy = "`on_event` of generate() in Python, or --events PATH (- is stdout)"
            raise invalid("stream", f"needs a destination for events: {remedy}")
        return params

    def _with_task(self, merged: dict[str, Any], task: Task | None) -> dict[str, Any]:
        """What counts of the parameters of a row with a task; of those of another row, what is not a task's.

        Raises:
            RowError: `invalid_field`: the row says how to embed and does not embed.
        """
        if task is not None:
            merged = {name: merged[name] for name in _KEPT if name in merged}
            merged |= {"max_new_tokens": 0, "temperature": 0.0, task: True}
        if task == "embed":
            return merged
        if odd := next((name for name in _HOW if name in self.values), None):
            raise invalid(self.spelled[odd], "needs `embed: true`")
        return {name: value for name, value in merged.items() if name == task or name not in (*_TASKS, *_HOW)}

    def _merge_logprobs(self, merged: dict[str, Any]) -> None:
        """Translate OpenAI's `logprobs` and `top_logprobs`.

        Without logprobs, the row's fields that depend on them are refused and the run-wide ones dropped.
        """
        logprobs, top = self.values.get("logprobs"), self.values.get("top_logprobs")
        native = [self.spelled[name] for name in ("return_logprob", "top_logprobs_num") if name in self.spelled]
        openai = [name for name in ("logprobs", "top_logprobs") if name in self.spelled]
        if native and openai:
            problem = f"is given together with `{native[0]}`, which has the same meaning; keep one of them"
            raise invalid(openai[0], problem)
        if type(logprobs) is int:
            if top is not None:
                raise invalid("top_logprobs", "is given together with a number in `logprobs`; keep one of them")
            merged["return_logprob"], merged["top_logprobs_num"] = True, logprobs
        elif logprobs is not None:
            merged["return_logprob"], merged["top_logprobs_num"] = logprobs, top or 0
        elif top is not None:
            merged["top_logprobs_num"] = top
        if not merged.get("return_logprob"):
            dependent = next((name for name in ("top_logprobs", "top_logprobs_num") if self.values.get(name)), None)
            if dependent:
                needed = "logprobs" if dependent == "top_logprobs" else "return_logprob"
                raise invalid(dependent, f"needs `{needed}: true`")
            for name, no_op in _LOGPROB_FIELDS:
                if self.values.get(name, no_op) != no_op:
                    raise invalid(self.spelled[name], "needs `return_logprob: true`")
                merged[name] = no_op
            merged["top_logprobs_num"] = 0

    def _merge_constraint(self, merged: dict[str, Any]) -> None:
        """Check that the row has one constraint at most, replace a run-wide one by it, translate `response_format`."""
        constraints = [name for name in CONSTRAINTS if self.values.get(name, False) is not False]
        response_format = self.values.get("response_format")
        if len(constraints) > 1 and response_format is not None and response_format["type"] == "text":
            constraints.remove("response_format")
        if len(constraints) > 1:
            first, second = (self.spelled[name] for name in constraints[:2])
            raise invalid(second, f"cannot be combined with `{first}`: a row has one constraint")
        if not constraints:
            return
        for name in CONSTRAINTS:
            if name not in constraints:
                merged.pop(name, None)
        if constraints == ["response_format"] and response_format is not None:
            merged.update(_from_response_format(response_format))
        elif constraints == ["dtype"]:
            merged["regex"] = DTYPE_PATTERNS[self.values["dtype"]]
        elif constraints == ["structured_outputs"]:
            merged.update(self.values["structured_outputs"])
        elif constraints == ["guided_json_object"]:
            merged["json_schema"] = {"type": "object"}

    def _respelled(self, error: RowError) -> RowError:
        """The same error with the alias that the row uses."""
        name = error.info.param or ""
        spelled = self.spelled.get(name, name)
        if spelled == name:
            return error
        return RowError(error.info.code, error.info.message.replace(f"`{name}`", f"`{spelled}`"), spelled)

    def refuse_chat_fields(self, prompt: str) -> None:
        """Refuse a field of a conversation in a row whose prompt is in `prompt`.

        Raises:
            RowError: `invalid_field`.
        """
        asked = (name for name in CHAT_FIELDS if self.values.get(name) not in (None, (), {}, False))
        unused = next((self.spelled[name] for name in asked), None)
        if unused is not None:
            raise invalid(unused, f"needs `messages`; it has no effect on a prompt in `{prompt}`, remove it")

    def prompt_error(self, sources: Sequence[str], needed: str) -> RowError:
        """Error for a row with no prompt field or several, listed in `found`."""
        if not sources:
            return RowError(ErrorCode.MISSING_PROMPT, f"the row has no prompt; give it {needed}")
        names = " and ".join(f"`{self.spelled.get(name, name)}`" for name in sources)
        return RowError(
            ErrorCode.AMBIGUOUS_PROMPT, f"the row has several prompts, {names}; keep one of them", sources[1]
        )


def _from_response_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Native constraint field of a `response_format`."""
    if response_format["type"] == "text":
        return {}
    if response_format["type"] == "structural_tag":
        return {"structural_tag": dict(response_format)}
    if response_format["type"] == "json_schema":
        inner = response_format["json_schema"]
        if inner.get("schema") is not None:  # OpenAI's wrapper: name, schema, strict
            return {"json_schema": inner["schema"]}
        if "name" not in inner and "schema" not in inner:  # the schema itself, as some servers accept it
            return {"json_schema": inner}
    return {"json_schema": {"type": "object"}}


def chat_prompt(
    row: RowValues, layout: Layout, messages: tuple[Mapping[str, Any], ...], defaults: RowDefaults
) -> ChatPrompt:
    """Conversation with the row's chat fields, and the run's system message in front if it has none.

    Raises:
        RowError: `invalid_field` if the row requests both a new and a continued turn, or chat is disabled.
    """
    if defaults.chat is False:
        raise invalid("messages", "needs the chat template, which --no-chat disables; give the prompt as `text`")
    values, system = row.values, defaults.system
    if system is not None and not any(message["role"] in ("system", "developer") for message in messages):
        messages = ({"role": "system", "content": system}, *messages)
    if not layout.has_chat_fields and not layout.to_template:
        return ChatPrompt(messages)
    continued = values.get("continue_final_message", False)
    if continued and values.get("add_generation_prompt"):
        raise invalid("continue_final_message", "cannot be true with `add_generation_prompt: true`; keep one of them")
    tools, choice = values.get("tools") or None, values.get("tool_choice", AUTO)
    if choice.mode == "required" and tools is None:
        raise invalid("tool_choice", "needs `tools` that can be called; add them, or leave it out")
    return ChatPrompt(
        messages=messages,
        tools=None if choice.mode == "none" else tools,
        template_kwargs=_template_variables(row, layout, defaults),
        add_generation_prompt=values.get("add_generation_prompt", not continued),
        continue_final_message=continued,
        tool_choice=choice,
        parallel_tool_calls=values.get("parallel_tool_calls", True),
    )


def _template_variables(row: RowValues, layout: Layout, defaults: RowDefaults) -> Mapping[str, Any]:
    """The row's variables for the chat template; one that the template does not read, or given twice, is refused."""
    variables: dict[str, Any] = dict(row.values.get("chat_template_kwargs", {}))
    for known in layout.to_template:
        name = known.name
        if name not in row.values:
            continue
        if name in variables:
            raise invalid(name, "is given twice (also in `chat_template_kwargs`); keep one of them")
        if defaults.template_reads(name):
            variables[name] = row.values[name]
        elif not (defaults.ignore_template_options or known.requests_nothing(row.values[name])):
            problem = "cannot reach the prompt: the model's chat template does not read it; leave it out"
            raise error_at(ErrorCode.UNSUPPORTED_FIELD, name, problem)
    return variables
