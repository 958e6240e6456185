"""What native rows and OpenAI bodies share: run-wide defaults, collecting fields, building `SamplingParams`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from batchgen.checks import check_unicode, invalid, show
from batchgen.errors import ErrorCode, RowError, UsageError
from batchgen.fields import CONSTRAINTS, LOOKUP, SOURCES, Field, Place, unknown_field
from batchgen.params import SamplingParams
from batchgen.prompts import ChatPrompt

__all__ = ["DECIDING", "PLAIN", "RowDefaults", "RowValues", "chat_prompt"]

_LOGPROB_FIELDS: tuple[tuple[str, Any], ...] = (
    ("logprob_start_len", -1),
    ("token_ids_logprob", ()),
    ("return_text_in_logprobs", False),
)
"""What says which logprobs are returned, with the value that asks for none."""
_PARAM_NAMES = frozenset(item.name for item in fields(SamplingParams))
DECIDING = _PARAM_NAMES | {"logprobs", "top_logprobs", "response_format", "model"}
"""Fields of a row that decide its `SamplingParams`."""
_MOST_KNOWN = 256
"""Parameter sets that `RowDefaults` keeps; the rows of most jobs share a few."""
PLAIN = frozenset({int, float, bool})
"""Types whose values hold no text."""


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """What holds for every row of a run unless the row says otherwise.

    Precedence of a sampling value: row, `flags`, the endpoint's default (`max_new_tokens` of OpenAI lines), `model`,
    the defaults of `SamplingParams`.

    Raises:
        UsageError: a flag or model default is unknown or out of range.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields given run-wide on the command line or in the configuration."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams` fields from the model's generation_config.json; empty under `--sampling-defaults openai`."""
    model_names: frozenset[str] = frozenset()
    """Values that a row's `model` may have, besides `*`."""
    adapters: frozenset[str] = frozenset()
    """Names of the adapters that rows may ask for."""
    chat: bool | None = None
    """True: `text` is wrapped as a user message. False: rows of messages are refused. None: each row as it is."""
    system: str | None = None
    """A system message for every conversation that has none."""
    events: bool = False
    """Whether the run has a place for the events of rows with `stream`."""
    processors: frozenset[str] = frozenset()
    """Logit processors that the run was given."""
    _known: dict[Hashable, SamplingParams] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Parameters of rows so far, by the values that decide them and by themselves: equal rows share one object."""

    def __post_init__(self) -> None:
        for name, value in [*self.flags.items(), *self.model.items()]:
            if name not in _PARAM_NAMES:
                raise UsageError(f"`{name}` is no sampling parameter; known are {', '.join(sorted(_PARAM_NAMES))}")
            try:
                # Alone: a minimum may well exceed the default maximum, and fit a row's own. What a processor is told
                # says nothing without one.
                named = self.flags.get("custom_logit_processor")
                SamplingParams(**{"max_new_tokens": None, "custom_logit_processor": named, name: value})
            except RowError as error:
                raise UsageError(f"default sampling parameter {error}") from None

    def unread(self, params: Iterable[SamplingParams]) -> list[str]:
        """Run-wide fields that say which logprobs are returned, where none of a job's rows returns any."""
        wanted = [("top_logprobs_num", 0), *_LOGPROB_FIELDS]
        asked = [name for name, nothing in wanted if self.flags.get(name, nothing) != nothing]
        return [] if not asked or any(one.return_logprob for one in params) else asked

    def share(self, key: Hashable, params: SamplingParams) -> SamplingParams:
        """Keep `params` under `key`, or what is kept already and equals it under another."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        equal = self._known.setdefault((params,), params)
        self._known[key] = equal
        return equal

    def known(self, key: Hashable) -> SamplingParams | None:
        """What was kept under `key`."""
        return self._known.get(key)


@dataclass(slots=True)
class RowValues:
    """The fields of one row as they are collected: normalised values by canonical name."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Canonical name -> the name the row uses."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Unknown top-level keys, to be carried."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Fields of an OpenAI body that are carried."""
    later: list[Field] = field(default_factory=list)
    """Known fields that are not built, whose values may yet turn out to ask for nothing."""

    def collect(self, source: Mapping[str, Any], place: Place) -> None:
        """Check and take every field of `source`. Null is absent.

        Raises:
            RowError: `invalid_field`, `unknown_field`, `invalid_unicode`, `token_out_of_range`, `unsupported_field`.
        """
        table = LOOKUP[place]
        for key, value in source.items():
            known = table.get(key)
            if known is None:
                self._unknown(key, value, place)
            elif value is not None:
                self._take(known, key, value)

    def carry(self, source: Mapping[str, Any], place: Place) -> None:
        """Take of `source` what is carried and can be, and nothing else."""
        table = LOOKUP[place]
        for key, value in source.items():
            known = table.get(key)
            if known is None or known.carried:
                with suppress(RowError):
                    self.collect({key: value}, place)

    def _unknown(self, key: str, value: Any, place: Place) -> None:
        if type(key) is not str:  # never from JSON; a Python caller may err
            raise RowError(ErrorCode.INVALID_JSON, f"field names must be strings, got {show(key)}")
        if not key.isascii():
            check_unicode(key, ascii(key)[1:-1])
        if type(value) is not str or not value.isascii():
            check_unicode(value, key)
        if place == "row":
            self.extra[key] = value
        elif value is not None:
            raise unknown_field(key, place)

    def _take(self, known: Field, key: str, value: Any) -> None:
        kind = type(value)
        if kind not in PLAIN and (kind is not str or not value.isascii()):
            check_unicode(value, key)
        name = known.name
        if name in self.spelled:
            other = self.spelled[name]
            where = "twice (flat and in `sampling_params`)" if other == key else f"beside `{other}`, which is the same"
            raise invalid(key, f"is given {where}; keep one of them")
        self.spelled[name] = key
        checked = known.check(key, value)
        if known.carried:
            self.carried[key] = checked
            return
        self.values[name] = checked
        if not known.built:
            self.later.append(known)

    def refuse_unbuilt(self) -> None:
        """Refuse the first field whose value asks for something that this version cannot do.

        Raises:
            RowError: `unsupported_field`.
        """
        asking = [item for item in self.later if not item.neutral(self.values[item.name], self.values)]
        if asking:
            spelled = self.spelled[asking[0].name]
            message = f"`{spelled}` is not supported by this version; {asking[0].remedy}"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, message, spelled)

    def imply(self, name: str, value: Any, reason: str) -> None:
        """Set the field `name`, unless the row gives it, because of what the field `reason` says."""
        if name in self.spelled:
            return
        self.values[name], self.spelled[name] = value, self.spelled[reason]

    @property
    def scores(self) -> bool:
        """Whether texts are to be scored, and nothing generated."""
        return "completion" in self.values or "completions" in self.values

    def sources(self) -> list[str]:
        """Canonical names of the prompt sources that the row gives."""
        return [name for name in SOURCES if name in self.spelled]

    def check_model(self, defaults: RowDefaults, params: SamplingParams) -> None:
        """Hold `model` and the adapter to the run's.

        Raises:
            RowError: `unknown_adapter`, or `invalid_field` for another model or for two different adapters.
        """
        model, adapter = self.values.get("model"), params.lora_path
        base, named = _base_and_adapter(model, defaults.model_names)
        if base is None:
            ours = " or ".join([*sorted(defaults.model_names), "*"])
            raise invalid("model", f"is {show(model)}, but this run's model is {ours}; correct it or leave it out")
        if named is not None and adapter != named:
            raise invalid("lora_path", f"is {show(adapter)}, but `model` names the adapter {show(named)}; keep one")
        if adapter is not None and adapter not in defaults.adapters:
            field = "model" if named is not None else self.spelled.get("lora_path", "lora_path")
            known = ", ".join(sorted(defaults.adapters)) or "none"
            message = f"`{field}` names the adapter {show(adapter)}, and those of this run are: {known}"
            raise RowError(ErrorCode.UNKNOWN_ADAPTER, f"{message}; give it with --lora NAME=PATH", field)

    def params(self, defaults: RowDefaults, endpoint: Mapping[str, Any]) -> SamplingParams:
        """The row's sampling parameters over all defaults; `endpoint` holds those of the row's OpenAI endpoint.

        Of defaults a row that scores takes the adapter alone, and one that says that nothing is generated no minimum.

        Rows whose values are equal get the same object; what is wrong with a row is found anew each time.

        Raises:
            RowError: `invalid_field`, naming the field as the row spells it; `unknown_processor`.
        """
        key = self._key(endpoint)
        try:
            found = defaults.known(key) if key is not None else None
        except TypeError:  # a value is an object, such as a schema, and cannot be looked up
            key = found = None
        if found is not None:
            return found
        params = self._new_params(defaults, endpoint)
        return defaults.share(key, params) if key is not None else params

    def _key(self, endpoint: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What decides the row's parameters beside the run's defaults; None for a row with a seed, which is its own.

        Types are part of it: `logprobs` may be true or 1, which are equal and do not mean the same.
        """
        if "seed" in self.values:
            return None
        given = [(name, type(value), value) for name, value in self.values.items() if name in DECIDING]
        return (self.scores, *endpoint.items(), *given)

    def _new_params(self, defaults: RowDefaults, endpoint: Mapping[str, Any]) -> SamplingParams:
        merged = {**defaults.model, **endpoint, **defaults.flags}
        if self.scores:
            merged = {name: value for name, value in merged.items() if name == "lora_path"}
        if self.values.get("max_new_tokens") == 0:
            merged.pop("min_new_tokens", None)
        merged.update((name, value) for name, value in self.values.items() if name in _PARAM_NAMES)
        self._merge_logprobs(merged)
        self._merge_constraint(merged)
        named = _base_and_adapter(self.values.get("model"), defaults.model_names)[1]
        if named is not None and "lora_path" not in self.values:
            merged["lora_path"] = named
        try:
            params = SamplingParams(**merged)
        except RowError as error:
            raise self._respelled(error) from None
        self._check_processor(params.custom_logit_processor, defaults.processors)
        if params.stream and not defaults.events:
            raise invalid(
                "stream", "needs a place for its events: --events PATH, or - for stdout (in Python: `on_event`)"
            )
        return params

    def _check_processor(self, name: str | None, known: frozenset[str]) -> None:
        if name is not None and name not in known:
            ours = f"it was given {', '.join(sorted(known))}" if known else "it was given none"
            message = f"`custom_logit_processor` names {show(name)}, which this run does not have ({ours}); add it with"
            raise RowError(
                ErrorCode.UNKNOWN_PROCESSOR,
                f"{message} --logit-processor {name[:60]}=module:function",
                "custom_logit_processor",
            )

    def _merge_logprobs(self, merged: dict[str, Any]) -> None:
        """Translate OpenAI's `logprobs` and `top_logprobs`, and refuse a K that would return nothing."""
        asked, top = self.values.get("logprobs"), self.values.get("top_logprobs")
        ours = [self.spelled[name] for name in ("return_logprob", "top_logprobs_num") if name in self.spelled]
        theirs = [name for name in ("logprobs", "top_logprobs") if name in self.spelled]
        if ours and theirs:
            raise invalid(theirs[0], f"is given beside `{ours[0]}`, which is the same; keep one of them")
        if type(asked) is int:
            if top is not None:
                raise invalid("top_logprobs", "is given beside a number in `logprobs`; keep one of them")
            merged["return_logprob"], merged["top_logprobs_num"] = True, asked
        elif asked is not None:
            merged["return_logprob"], merged["top_logprobs_num"] = asked, top or 0
        elif top is not None:
            merged["top_logprobs_num"] = top
        if not merged.get("return_logprob"):
            wanting = next((name for name in ("top_logprobs", "top_logprobs_num") if self.values.get(name)), None)
            if wanting:
                needed = "logprobs" if wanting == "top_logprobs" else "return_logprob"
                raise invalid(wanting, f"needs `{needed}: true` beside it")
            self._drop_logprob_fields(merged)

    def _drop_logprob_fields(self, merged: dict[str, Any]) -> None:
        """Refuse fields of the row that say which logprobs are returned while none are; run-wide ones are dropped."""
        for name, nothing in _LOGPROB_FIELDS:
            if self.values.get(name, nothing) != nothing:
                raise invalid(self.spelled[name], "needs `return_logprob: true` beside it")
            merged[name] = nothing
        merged["top_logprobs_num"] = 0

    def _merge_constraint(self, merged: dict[str, Any]) -> None:
        """Hold the row to one constraint, which replaces a run-wide one, and translate `response_format`."""
        given = [name for name in CONSTRAINTS if name in self.values]
        asked = self.values.get("response_format")
        if len(given) > 1 and asked is not None and asked["type"] == "text":
            given.remove("response_format")
        if len(given) > 1:
            first, second = (self.spelled[name] for name in given[:2])
            raise invalid(second, f"cannot stand beside `{first}`: a row has one constraint")
        if not given:
            return
        for name in CONSTRAINTS:
            if name not in given:
                merged.pop(name, None)
        if given == ["response_format"] and asked is not None:
            merged.update(_from_response_format(asked))

    def _respelled(self, error: RowError) -> RowError:
        """The same error under the alias that the row uses."""
        name = error.info.param or ""
        spelled = self.spelled.get(name, name)
        if spelled == name:
            return error
        return RowError(error.info.code, error.info.message.replace(f"`{name}`", f"`{spelled}`"), spelled)

    def prompt_error(self, found: list[str], needed: str) -> RowError:
        """The error for a row whose prompt sources, `found`, are none or several."""
        if not found:
            return RowError(ErrorCode.MISSING_PROMPT, f"the row has no prompt; give it {needed}")
        names = " and ".join(f"`{self.spelled.get(name, name)}`" for name in found)
        return RowError(ErrorCode.AMBIGUOUS_PROMPT, f"the row has several prompts, {names}; keep one of them", found[1])


def _base_and_adapter(model: str | None, names: frozenset[str]) -> tuple[str | None, str | None]:
    """`model` of a row as (base, adapter): base is None for another model than the run's, adapter without one."""
    if model is None or model == "*" or model in names:
        return model or "*", None
    for base in ("*", *names):
        if model.startswith(f"{base}:") and len(model) > len(base) + 1:
            return base, model[len(base) + 1 :]
    return None, None


def _from_response_format(asked: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's spelling of a constraint as one of ours."""
    if asked["type"] == "text":
        return {}
    if asked["type"] == "structural_tag":
        return {"structural_tag": dict(asked)}
    if asked["type"] == "json_schema":
        inner = asked["json_schema"]
        if inner.get("schema") is not None:  # the wrapper of the API: name, schema, strict
            return {"json_schema": inner["schema"]}
        if "name" not in inner and "schema" not in inner:  # the schema itself, as some servers take it
            return {"json_schema": inner}
    return {"json_schema": {"type": "object"}}


def chat_prompt(row: RowValues, messages: tuple[Mapping[str, Any], ...], defaults: RowDefaults) -> ChatPrompt:
    """A conversation with the row's chat fields, and the run's system message in front where it has none.

    Raises:
        RowError: `invalid_field` where both a new turn and a continued one are asked for, or chat is ruled out.
    """
    if defaults.chat is False:
        raise invalid("messages", "needs the chat template, which --no-chat rules out; give the prompt as `text`")
    values, system = row.values, defaults.system
    if system is not None and not any(message["role"] in ("system", "developer") for message in messages):
        messages = ({"role": "system", "content": system}, *messages)
    continued = values.get("continue_final_message", False)
    if continued and values.get("add_generation_prompt"):
        raise invalid("continue_final_message", "cannot be true with `add_generation_prompt: true`; keep one of them")
    return ChatPrompt(
        messages=messages,
        tools=values.get("tools") or None,
        template_kwargs=values.get("chat_template_kwargs", {}),
        add_generation_prompt=values.get("add_generation_prompt", not continued),
        continue_final_message=continued,
    )
