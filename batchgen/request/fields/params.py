"""`SamplingParams`: the validated sampling parameters of one row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from batchgen.request import checks
from batchgen.request.checks import (
    Integer,
    Number,
    boolean,
    ids,
    invalid,
    mapping,
    nonempty_ids,
    nonempty_string,
    string,
    string_or_mapping,
    strings,
)
from batchgen.request.fields import field_checks
from batchgen.request.fields.constraint import Constraint, check_one, constraint_of
from batchgen.request.fields.field import Place, accepting_aliases, declared_fields, sampling, stored_value
from batchgen.request.fields.hidden_states import HiddenStates, hidden_states

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""

Task = Literal["embed", "classify", "rerank"]
"""What a row without generated text asks for: an embedding, the scores of labels, or of documents for a query."""
_NATIVE: tuple[Place, ...] = ("row", "pairs", "params")

MAX_STOPS = 32
"""Most stop strings, and most stop patterns, of a row."""


class _HashedOnce:
    """Base of a frozen value that is the key of several caches: its hash is computed once."""

    __slots__ = ("_hash",)
    _hash: int


@accepting_aliases
@dataclass(frozen=True, slots=True)
class SamplingParams(_HashedOnce):
    """Sampling parameters of a row: how to sample, when to stop and what to return.

    Rows with equal parameters share one object, so that it is a fast key.

    Raises:
        RowError: `invalid_field`, naming the field, for any value out of its range; `unknown_field` for another name.
    """

    temperature: float = sampling(
        1.0, Number(0.0), "Sampling temperature; 0 is greedy. Example: --temperature 0.7", body_check=Number(0.0, 2.0)
    )
    top_p: float = sampling(
        1.0, Number(0.0, 1.0, low_open=True), "Probability mass of nucleus sampling, in (0, 1]. Example: --top-p 0.95"
    )
    top_k: int = sampling(
        -1, Integer(-1, 1 << 31), "Number of likeliest tokens to sample from; -1 or 0 is all. Example: --top-k 40"
    )
    """-1 keeps all tokens (0 is accepted and normalised to -1)."""
    min_p: float = sampling(
        0.0,
        Number(0.0, 1.0),
        "Least probability of a token, relative to the likeliest, in [0, 1]. Example: --min-p 0.05",
    )
    max_new_tokens: int | None = sampling(
        128,
        Integer(0, 1 << 31),
        "Most tokens to generate per sample; the default is 128. Example: --max-new-tokens 512",
        aliases=("max_tokens", "max_completion_tokens"),
    )
    """None: up to the end of the context."""
    min_new_tokens: int = sampling(
        0,
        Integer(0, 1 << 31),
        "Fewest tokens to generate per sample. Example: --min-new-tokens 8",
        aliases=("min_tokens",),
    )
    """Ids that would stop the row are masked until this many tokens are generated."""
    seed: int | None = sampling(None, Integer())
    """None: the seed is derived from the run seed and the row's id. It has no option: `--seed` is the run seed."""
    stop: tuple[str, ...] = sampling((), strings, "String that ends a sample; repeatable. Example: --stop END")
    """A single string or a list is accepted, too."""
    stop_token_ids: tuple[int, ...] = sampling((), ids, "Token ids that end a sample. Example: --stop-token-ids 2,13")
    ignore_eos: bool = sampling(False, boolean, "Continue after the end-of-sequence token. Example: --ignore-eos")
    no_stop_trim: bool = sampling(False, boolean, "Keep the matched stop in the text. Example: --no-stop-trim")
    skip_special_tokens: bool = sampling(
        True, boolean, "Remove special tokens from the text; on by default. Example: --no-skip-special-tokens"
    )
    spaces_between_special_tokens: bool = sampling(
        True,
        boolean,
        "Put spaces between special tokens in the text; on by default. Example: --no-spaces-between-special-tokens",
    )
    echo: bool = sampling(False, boolean, "Put the text of the prompt before the generated text. Example: --echo")
    suffix: str | None = sampling(None, string)
    """Text after the completion, for tokenizers with fill-in-the-middle tokens. An empty string becomes None.

    It has no option, because a suffix belongs to one prompt.
    """
    n: int = sampling(1, Integer(1, 1 << 20), "Number of samples per prompt. Example: --n 4")
    return_logprob: bool = sampling(False, boolean, "Write logprobs of the generated tokens. Example: --return-logprob")
    top_logprobs_num: int = sampling(
        0,
        Integer(0, 1 << 20),
        "Number of likeliest tokens per position whose logprobs are written. "
        "Example: --return-logprob --top-logprobs-num 5",
    )
    logprob_start_len: int = sampling(
        -1,
        Integer(-1, 1 << 31),
        "Write logprobs of prompt tokens from this position on; -1 is none. "
        "Example: --return-logprob --logprob-start-len 0",
    )
    token_ids_logprob: tuple[int, ...] = sampling(
        (),
        ids,
        "Token ids whose logprobs are written at every position. Example: --return-logprob --token-ids-logprob 2,13",
    )
    return_text_in_logprobs: bool = sampling(
        False,
        boolean,
        "Write the text of each token with its logprob. Example: --return-logprob --return-text-in-logprobs",
    )
    return_hidden_states: HiddenStates | None = sampling(  # noqa: RUF009 a declaration, not a shared object
        None,
        hidden_states,
        "Write hidden states of all tokens, the prompt, the output or the last token, their mean, or those selected by "
        "a JSON object with `layers`, `tokens` and `pool`. Example: --return-hidden-states last",
    )
    """True, False or a mapping is accepted, too."""
    return_routed_experts: bool = sampling(
        False,
        boolean,
        "Write the experts selected for each token by a mixture-of-experts model. Example: --return-routed-experts",
    )
    best_of: int | None = sampling(
        None,
        Integer(1, 1 << 20),
        "Number of samples to generate, of which the --n likeliest are kept. Example: --best-of 4",
    )
    """None means `n`."""
    frequency_penalty: float = sampling(
        0.0,
        Number(-2.0, 2.0),
        "Penalty subtracted from a token's logit for each time it was generated, in [-2, 2]. "
        "Example: --frequency-penalty 0.5",
    )
    presence_penalty: float = sampling(
        0.0,
        Number(-2.0, 2.0),
        "Penalty subtracted from the logits of generated tokens, in [-2, 2]. Example: --presence-penalty 0.5",
    )
    repetition_penalty: float = sampling(
        1.0,
        Number(0.0, 2.0, low_open=True),
        "Factor that divides positive and multiplies negative logits of generated tokens, in (0, 2]. "
        "Example: --repetition-penalty 1.1",
    )
    logit_bias: tuple[tuple[int, float], ...] = sampling(
        (),
        field_checks.logit_bias,
        "Values in [-100, 100] added to the logits of tokens. Example: --logit-bias 13=-100,20=2.5",
    )
    """(token id, bias) sorted by id. A mapping is accepted, too."""
    bad_words: tuple[str | tuple[int, ...], ...] = sampling(
        (), field_checks.bad_words, "String that must not be generated; repeatable. Example: --bad-words sorry"
    )
    """Strings, or sequences of ids, that must not be generated: their last token is masked."""
    suppress_tokens: tuple[int, ...] = sampling(
        (), ids, "Token ids that are never sampled. Example: --suppress-tokens 2,13"
    )
    begin_suppress_tokens: tuple[int, ...] = sampling(
        (), ids, "Token ids that are not sampled first. Example: --begin-suppress-tokens 2,13"
    )
    allowed_token_ids: tuple[int, ...] | None = sampling(
        None, nonempty_ids, "The only token ids that may be sampled. Example: --allowed-token-ids 2,13"
    )
    json_schema: str | None = sampling(
        None,
        string_or_mapping,
        "JSON Schema that the text must satisfy, given as JSON or as @ and the path of a file. "
        "Example: --json-schema @person.json",
        aliases=("guided_json",),
        json_text="text",
    )
    """JSON text; a mapping is accepted, too. At most one constraint may be given."""
    separate_reasoning: bool | None = sampling(
        None,
        boolean,
        "Write the model's thoughts to the column `reasoning` and only the answer to `text`; on by default for "
        "conversations. Example: --no-separate-reasoning",
    )
    """None: as the prompt is a conversation, if the model's format of thoughts is known."""
    thinking_budget: int | None = sampling(
        None,
        Integer(0, 1 << 31),
        "Most tokens of the model's thoughts, after which the marker that ends them is written. "
        "Example: --thinking-budget 1024",
        aliases=("thinking_token_budget",),
    )
    """None: as many as the model writes."""
    constrain_reasoning: bool = sampling(
        False,
        boolean,
        "Apply the constraint to the thoughts, too, and not to the answer alone. Example: --constrain-reasoning",
    )
    regex: str | None = sampling(
        None,
        nonempty_string,
        "Regular expression that the whole text must match. Example: --regex '[0-9]{4}'",
        aliases=("guided_regex",),
    )
    ebnf: str | None = sampling(
        None,
        nonempty_string,
        "EBNF grammar that the text must follow, given as text or as @ and the path of a file. "
        "Example: --ebnf @answer.gbnf",
        metavar="TEXT|@PATH",
        aliases=("guided_grammar",),
    )
    structural_tag: str | None = sampling(
        None,
        string_or_mapping,
        "Structural tag that the text must satisfy, given as JSON or as @ and the path of a file. "
        "Example: --structural-tag @calls.json",
        json_text="text",
    )
    """JSON text; a mapping is accepted, too."""
    choice: tuple[str, ...] | None = sampling(
        None,
        field_checks.choice,
        "String that the whole text may be; repeat it for each choice. Example: --choice yes --choice no",
        aliases=("guided_choice",),
    )
    stop_regex: tuple[str, ...] = sampling(
        (),
        strings,
        "Regular expression whose match in the output ends a sample; repeatable. Example: --stop-regex '[0-9]+'",
    )
    """A single pattern or a list is accepted, too."""
    custom_logit_processor: str | None = sampling(
        None,
        nonempty_string,
        "Name of the --logit-processor to apply to rows. Example: --custom-logit-processor calm",
        metavar="NAME",
    )
    custom_params: str | None = sampling(
        None,
        mapping,
        "Parameters of --custom-logit-processor: a JSON object, given as JSON or as @ and the path of a file. "
        "Example: --custom-params '{\"strength\": 2}'",
    )
    """JSON text of an object; a mapping is accepted, too."""
    lora_path: str | None = sampling(
        None, nonempty_string, "Name of the --lora adapter to apply to rows. Example: --lora-path fr", metavar="NAME"
    )
    stream: bool = sampling(
        False, boolean, "Write an event for each token of rows to --events. Example: --events events.jsonl --stream"
    )
    stream_options: field_checks.StreamOptions | None = sampling(  # noqa: RUF009 as above
        None, field_checks.stream_options
    )
    """A mapping is accepted, too. It has no option: it belongs to the consumer of a row's events."""
    return_cached_tokens_details: bool = sampling(
        False, boolean, "Write what `cached_tokens` consists of. Example: --return-cached-tokens-details"
    )
    embed: bool = sampling(
        False, boolean, "Write the embedding of each prompt instead of text. Example: --embed", places=_NATIVE
    )
    classify: bool = sampling(
        False, boolean, "Write the score of each label instead of text. Example: --classify", places=_NATIVE
    )
    dimensions: int | None = sampling(
        None,
        Integer(1, 1 << 20),
        "Number of leading numbers of embeddings to keep; the default is all. Example: --embed --dimensions 256",
        places=(*_NATIVE, "embeddings"),
    )
    prompt_name: str | None = sampling(
        None,
        nonempty_string,
        "Prompt of the checkpoint to put in front of texts to embed. Example: --embed --prompt-name query",
        metavar="NAME",
        places=_NATIVE,
    )
    """None: the checkpoint's default, if it has one."""

    rerank: bool = sampling(False, boolean, places=())
    """Whether the row scores documents for a query."""
    tool_choice: str | None = sampling(None, string, places=())
    """The calls that the row's `tool_choice` requires, as the encoder writes them: see `text/tools/rows.py`."""
    tool_calls: str | None = sampling(None, string, places=())
    """How calls of the row's tools are found, as the encoder writes it; None: they are not looked for."""

    def __post_init__(self) -> None:
        for name, check, default, optional in _CHECKS:
            value = getattr(self, name)
            if value is default:
                continue
            if value is None and not optional:
                raise invalid(name, "must not be null; leave it out for its default")
            if value is not None:
                object.__setattr__(self, name, checks.bounded(name, stored_value(name, check, value)))
        self._check_lengths()
        self._check_stops()
        check_one(self)
        self._check_returned()

    def _check_lengths(self) -> None:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problem = f"must not exceed max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            raise invalid("min_new_tokens", problem)
        if self.best_of is not None and self.best_of < self.n:
            raise invalid("best_of", f"must be at least n ({self.n}), got {self.best_of}")

    def _check_stops(self) -> None:
        for name, stops, what in (("stop", self.stop, "strings"), ("stop_regex", self.stop_regex, "patterns")):
            if len(stops) > MAX_STOPS:
                raise invalid(name, f"must have at most {MAX_STOPS} {what}, got {len(stops)}")
        checks.short_strings("stop", self.stop)
        if self.stop_regex:
            from batchgen.request.fields.stop_patterns import check_patterns  # imports regex, which is slow to start

            check_patterns("stop_regex", self.stop_regex)

    def _check_returned(self) -> None:
        states = self.return_hidden_states
        if states is not None and states.tokens == "output" and states.pool != "none" and self.max_new_tokens == 0:
            raise invalid("return_hidden_states", "pools the output, which is empty with max_new_tokens 0")
        if self.stream and (self.best_of or 1) > 1:
            problem = "cannot be true with `best_of` above 1: the samples to keep are known only at the end"
            raise invalid("stream", problem)
        if self.custom_params is not None and self.custom_logit_processor is None:
            raise invalid("custom_params", "needs `custom_logit_processor`")

    def __repr__(self) -> str:
        values = [(name, getattr(self, name), default) for name, _, default, _ in _CHECKS]
        changed = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"SamplingParams({', '.join(changed)})"

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(tuple([getattr(self, name) for name, *_ in _CHECKS])))
            return self._hash

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
    def task(self) -> Task | None:
        """What is returned instead of text; None: text, or its score."""
        return "embed" if self.embed else "classify" if self.classify else "rerank" if self.rerank else None

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
        return constraint_of(self)

    @property
    def constrains_all(self) -> bool:
        """Whether a constraint holds for the thoughts, too; else for the answer alone."""
        return self.constrain_reasoning or not self.separate_reasoning

    @property
    def modifies_logits(self) -> bool:
        """Whether something other than masks of first tokens changes the logits before the sampling filters."""
        return (
            self.has_penalties
            or bool(self.logit_bias or self.bad_words or self.suppress_tokens)
            or self.allowed_token_ids is not None
            or self.custom_logit_processor is not None
            or self.constraint is not None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a frequency, presence or repetition penalty is set."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


_DECLARED = declared_fields(SamplingParams)
SAMPLING_FIELDS = tuple(field for field in _DECLARED if field.places)
"""The fields of rows that `SamplingParams` declares."""
PARAMETERS = tuple(dict.fromkeys(field.name for field in SAMPLING_FIELDS))
"""Their names."""
_CHECKS = tuple(
    (item.name, field.check, item.default, "None" in str(item.type))
    for item in fields(SamplingParams)
    for field in _DECLARED
    if field.name == item.name and ("params" in field.places or not field.places)
)
"""(name, check, default, whether null is allowed) of each parameter."""
