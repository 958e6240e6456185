"""`SamplingParams`: the validated sampling parameters of one row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from batchgen.errors import ErrorCode, RowError
from batchgen.request.checks import INT64_HIGH, INT64_LOW, describe_range, invalid, show
from batchgen.request.stop_patterns import compile_pattern

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_STOPS",
    "CaptureSupport",
    "Constraint",
    "ConstraintKind",
    "HiddenStates",
    "SamplingParams",
]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""

MAX_STOPS = 32
"""Most stop strings, and most stop patterns, of a row."""

_MAX_NUMBERS = 2**31 - 1
"""Most numbers in a list of one output row."""

ConstraintKind = Literal[
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "choice",
]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
"""Kinds of constraints, which are also the names of the fields that give them."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the output text. Equal constraints are compiled once."""

    kind: ConstraintKind
    text: str
    """JSON of a schema, a structural tag or the list of choices; otherwise the pattern or grammar itself."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states that a row requests.

    Raises:
        RowError: `invalid_field` for a value out of its range.
    """

    layers: tuple[int, ...] = (-1,)
    """0: the embeddings, i: the output of block i, -1: after the final norm."""
    tokens: Literal["prompt", "output", "all", "last"] = "all"
    """Tokens whose states are returned."""
    pool: Literal["none", "last", "mean"] = "none"
    """Reduction over the tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise invalid("return_hidden_states", "must name at least one layer")
        for layer in self.layers:
            _check_int("return_hidden_states", layer, -1, 1 << 20)
        if len(set(self.layers)) != len(self.layers):
            raise invalid("return_hidden_states", "must name each layer once")
        if self.tokens not in ("prompt", "output", "all", "last"):
            raise invalid(
                "return_hidden_states", f"must have `tokens` prompt, output, all or last, got {show(self.tokens)}"
            )
        if self.pool not in ("none", "last", "mean"):
            raise invalid("return_hidden_states", f"must have `pool` none, last or mean, got {show(self.pool)}")

    def max_rows(self, prompt: int, output: int) -> int:
        """Most state vectors of a layer for `prompt` and `output` tokens."""
        if self.pool != "none" or self.tokens == "last":
            return 1
        return {"prompt": prompt, "output": output, "all": prompt + max(0, output - 1)}[self.tokens]


@dataclass(frozen=True, slots=True)
class CaptureSupport:
    """Hidden states and routed experts that a model can return."""

    layers: int | None = None
    """Index of the last layer; None if the model exposes no hidden states."""
    hidden_size: int = 0
    """Numbers in a state, H."""
    experts: bool = False
    """Whether the model is a mixture of experts whose routing can be read."""

    def check(self, params: SamplingParams, prompt: int, output: int) -> None:
        """Check that the model can return what a row requests.

        Args:
            params: the row's parameters.
            prompt: number of prompt tokens.
            output: most tokens of a completion.

        Raises:
            RowError: `unsupported_field` or `invalid_field`.
        """
        states = params.return_hidden_states
        if states is not None:
            self._check_states(states, states.max_rows(prompt, output))
        if params.return_routed_experts and not self.experts:
            problem = "needs a mixture of experts whose routing can be read, which this model is not; remove it"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, f"`return_routed_experts` {problem}", "return_routed_experts")

    def _check_states(self, states: HiddenStates, rows: int) -> None:
        name = "return_hidden_states"
        if self.layers is None:
            problem = "is not supported for this model, because its decoder blocks cannot be identified; remove it"
            raise RowError(ErrorCode.UNSUPPORTED_FIELD, f"`{name}` {problem}", name)
        if max(states.layers) > self.layers:
            raise invalid(
                name,
                f"names layer {max(states.layers)}; the model has 0 (embeddings) to {self.layers}, and -1 (after the "
                "final norm)",
            )
        if rows * self.hidden_size > _MAX_NUMBERS:
            raise invalid(
                name, f"may have more than {_MAX_NUMBERS} numbers per layer; pool the states or shorten the row"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a row: how to sample, when to stop and what to return.

    Raises:
        RowError: `invalid_field`, naming the field, for any value out of its range.
    """

    max_new_tokens: int | None = 128
    """Most tokens to generate; None: up to the end of the context."""
    min_new_tokens: int = 0
    """Ids that would stop the row are masked until this many tokens are generated."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens (0 is accepted and normalised to -1)."""
    min_p: float = 0.0
    seed: int | None = None
    """None: the seed is derived from the run seed and the row's id."""
    n: int = 1
    best_of: int | None = None
    """Number of samples to generate, of which the `n` likeliest are kept; None means `n`."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) sorted by id. A mapping is accepted, too."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Strings, or sequences of ids, that must not be generated: their last token is masked."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids that may be sampled."""
    json_schema: str | None = None
    """JSON text; a mapping is accepted, too. At most one constraint may be given."""
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    """JSON text; a mapping is accepted, too."""
    choice: tuple[str, ...] | None = None
    stop: tuple[str, ...] = ()
    """A single string or a list is accepted, too."""
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    """A single pattern or a list is accepted, too."""
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_logprob: bool = False
    top_logprobs_num: int = 0
    echo: bool = False
    suffix: str | None = None
    """Text after the completion, for tokenizers with fill-in-the-middle tokens. An empty string becomes None."""
    logprob_start_len: int = -1
    """-1: output logprobs only; s >= 0: also those of the prompt from position s on."""
    token_ids_logprob: tuple[int, ...] = ()
    """Token ids whose logprobs are returned at every position."""
    return_text_in_logprobs: bool = False
    return_hidden_states: HiddenStates | None = None
    """True, False or a mapping is accepted, too."""
    return_routed_experts: bool = False
    lora_path: str | None = None
    """Name of a LoRA adapter of the run."""
    custom_logit_processor: str | None = None
    """Name of a logit processor of the run."""
    custom_params: str | None = None
    """Parameters of the processor: JSON text of an object; a mapping is accepted, too."""
    stream: bool = False
    """Whether an event is written for each token."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.top_k == 0:
            object.__setattr__(self, "top_k", -1)
        if self.suffix == "":
            object.__setattr__(self, "suffix", None)
        for name in ("stop", "stop_regex"):
            value = getattr(self, name)
            object.__setattr__(self, name, _strings(name, (value,) if isinstance(value, str) else value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
        for name in ("stop_token_ids", "token_ids_logprob", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and type(value) is not tuple:
                object.__setattr__(self, name, _items(name, value))
        if self.logit_bias != () or self.bad_words != ():
            self._normalise_biases()
        for name in _JSON:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, _json(name, value))
        if self.custom_params == "{}":
            object.__setattr__(self, "custom_params", None)
        if self.return_hidden_states is not None and type(self.return_hidden_states) is not HiddenStates:
            object.__setattr__(self, "return_hidden_states", _hidden_states(self.return_hidden_states))
        self._check_lengths()
        self._check_sampling()
        self._check_stops()
        self._check_biases()
        self._check_constraint()
        self._check_returned()

    def _check_kinds(self) -> None:
        """Check null values, booleans and strings."""
        for name in _REQUIRED:
            if getattr(self, name) is None:
                raise invalid(name, "must not be null; leave it out for its default")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if type(value) is not bool:
                raise invalid(name, f"must be true or false, got {show(value)}")
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and type(value) is not str:
                raise invalid(name, f"must be a string, got {show(value)}")

    def _normalise_biases(self) -> None:
        bias: Any = self.logit_bias
        if type(bias) is not tuple:
            try:
                pairs = tuple(sorted((int(token), float(b)) for token, b in dict(bias).items()))
            except (TypeError, ValueError):
                raise invalid("logit_bias", f"must map token ids to numbers, got {show(bias)}") from None
            object.__setattr__(self, "logit_bias", pairs)
        words = _items("bad_words", self.bad_words)
        words = tuple(word if isinstance(word, str) else _items("bad_words", word) for word in words)
        object.__setattr__(self, "bad_words", words)

    def _check_lengths(self) -> None:
        if self.max_new_tokens is not None:
            _check_int("max_new_tokens", self.max_new_tokens, 0, 1 << 31)
        _check_int("min_new_tokens", self.min_new_tokens, 0, 1 << 31)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise invalid(
                "min_new_tokens", f"must not exceed max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        _check_int("n", self.n, 1, 1 << 20)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, 1 << 20)
            if self.best_of < self.n:
                raise invalid("best_of", f"must be at least n ({self.n}), got {self.best_of}")

    def _check_sampling(self) -> None:
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 1 << 31)
        if self.seed is not None:
            _check_int("seed", self.seed, INT64_LOW, INT64_HIGH)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise invalid("stop", f"must have at most {MAX_STOPS} strings, got {len(self.stop)}")
        if any(not s for s in self.stop):
            raise invalid("stop", "must not contain an empty string")
        if len(self.stop_regex) > MAX_STOPS:
            raise invalid("stop_regex", f"must have at most {MAX_STOPS} patterns, got {len(self.stop_regex)}")
        for pattern in self.stop_regex:
            try:
                compile_pattern(pattern)
            except ValueError as problem:
                raise invalid("stop_regex", f"{show(pattern)} {problem}") from None
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 1 << 31)

    def _check_biases(self) -> None:
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0, low_open=True)
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, 1 << 31)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if any(not word for word in self.bad_words):
            raise invalid("bad_words", "must not contain an empty word")
        for word in self.bad_words:
            for token in () if isinstance(word, str) else word:
                _check_int("bad_words", token, 0, 1 << 31)
        for token in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token, 0, 1 << 31)
        if self.allowed_token_ids == ():
            raise invalid("allowed_token_ids", "must not be empty, because no token could be sampled")

    def _check_constraint(self) -> None:
        given = [kind for kind in CONSTRAINT_KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise invalid(given[1], f"cannot be combined with `{given[0]}`: a row has one constraint")
        if self.choice is not None and not self.choice:
            raise invalid("choice", "must not be empty")

    def _check_returned(self) -> None:
        states = self.return_hidden_states
        if states is not None and states.tokens == "output" and states.pool != "none" and self.max_new_tokens == 0:
            raise invalid("return_hidden_states", "pools the output, which is empty with max_new_tokens 0")
        _check_int("top_logprobs_num", self.top_logprobs_num, 0, 1 << 20)
        _check_int("logprob_start_len", self.logprob_start_len, -1, 1 << 31)
        for token in self.token_ids_logprob:
            _check_int("token_ids_logprob", token, 0, 1 << 31)
        if self.stream and (self.best_of or 1) > 1:
            raise invalid(
                "stream", "cannot be true with `best_of` above 1: the samples to keep are known only at the end"
            )
        if self.custom_params is not None and self.custom_logit_processor is None:
            raise invalid("custom_params", "needs `custom_logit_processor`")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always selected."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def returns_prompt_values(self) -> bool:
        """Whether values of prompt tokens are returned, so that the prompt is computed even if nothing is generated."""
        return (
            (self.return_logprob and self.logprob_start_len >= 0)
            or self.return_hidden_states is not None
            or self.return_routed_experts
        )

    @property
    def runs_to_limit(self) -> bool:
        """Whether only `max_new_tokens` can end a sample."""
        stops = self.stop or self.stop_regex or self.stop_token_ids
        return self.ignore_eos and not stops and self.constraint is None

    @property
    def samples(self) -> int:
        """Number of samples to generate: `best_of`, or `n`."""
        return self.best_of or self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether logprobs of the sampled tokens are computed: to return them, or to rank the samples of `best_of`."""
        return self.return_logprob or (self.best_of or 1) > 1

    @property
    def constraint(self) -> Constraint | None:
        """The row's constraint, if it has one."""
        for kind in CONSTRAINT_KINDS:
            value = getattr(self, kind)
            if value is not None:
                text = json.dumps(value, ensure_ascii=False) if kind == "choice" else value
                return Constraint(kind, text)
        return None

    @property
    def modifies_logits(self) -> bool:
        """Whether something other than `min_new_tokens` changes the logits before the sampling filters."""
        return (
            self.has_penalties
            or bool(self.logit_bias or self.bad_words)
            or self.allowed_token_ids is not None
            or self.custom_logit_processor is not None
            or self.constraint is not None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a frequency, presence or repetition penalty is set."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


_REQUIRED = tuple(item.name for item in fields(SamplingParams) if "None" not in str(item.type))
_BOOLEANS = tuple(item.name for item in fields(SamplingParams) if item.type == "bool")
_JSON = ("json_schema", "structural_tag", "custom_params")
_TEXTS = tuple(item.name for item in fields(SamplingParams) if item.type == "str | None" and item.name not in _JSON)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as problem:
        raise invalid(name, f"must be JSON: {problem}") from None


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise invalid(name, f"must be a list, got {show(value)}")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    found = value if type(value) is tuple else _items(name, value)
    if odd := [item for item in found if not isinstance(item, str)]:
        raise invalid(name, f"must contain only strings, got {show(odd[0])}")
    return found


def _hidden_states(value: Any) -> HiddenStates | None:
    if type(value) is bool:
        return HiddenStates() if value else None
    try:
        return HiddenStates(**value)
    except TypeError:
        known = ", ".join(item.name for item in fields(HiddenStates))
        problem = f"must be true, false or an object of {known}, got {show(value)}"
        raise invalid("return_hidden_states", problem) from None


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int:
        raise invalid(name, f"must be an integer, got {show(value)}")
    if not low <= value <= high:
        raise invalid(name, f"must be {describe_range(low, high)}, got {value}")


def _check_float(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise invalid(name, f"must be a finite number, got {show(value)}")
    if not low <= value <= high or (low_open and value == low):  # type: ignore[operator]
        bracket = "(" if low_open else "["
        raise invalid(name, f"must be in {bracket}{low:g}, {high:g}], got {value}")
