"""`BatchgenLM`: batchgen as the model of lm-eval, EleutherAI's evaluation harness.

Texts become token ids as in the harness's model `hf`: the same tokenizer, the same border between context and
continuation, the same truncation and rolling windows. All requests of one call are one batch of the engine, which
computes few-shot examples that they share once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from batchgen import __version__
from batchgen.engine.engine import Engine
from batchgen.errors import BatchgenError, UsageError, library_errors
from batchgen.request.completion import Completion, Score
from batchgen.request.fields.params import MAX_STOPS, PARAMETERS

NAME: Final = "batchgen"
_ADAPTER: Final = "peft"
"""Name of the adapter among the engine's."""
_DEVICES: Final = {None: "auto", "cuda": "auto", "cuda:0": "auto"}
"""Devices of the harness, whose default is cuda:0, that the engine finds by itself."""


class EvaluationError(UsageError, SystemExit):
    """An error that ends an evaluation, which the harness's command prints as one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = f"error: {message}"


try:
    import jinja2
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as _missing:
    _problem = f"lm-eval is not installed, or too old ({_missing}): pip install 'batchgen[lm-eval]'"
    raise EvaluationError(_problem) from _missing


def register() -> None:
    """Make `batchgen` known to the harness, which finds it by the package's entry point in versions after 0.4.13."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=BatchgenLM)


@contextmanager
def _errors() -> Iterator[None]:
    """Errors of batchgen as `EvaluationError`."""
    try:
        yield
    except BatchgenError as error:
        raise EvaluationError(str(error)) from error


class BatchgenLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness, computed by an `Engine`.

    Args:
        pretrained: model folder or Hugging Face id.
        max_length: most tokens of a request; None: the model's context.
        max_gen_toks: most tokens to generate for a task that does not say.
        add_bos_token: whether special tokens are added to texts; None: as the tokenizer does.
        prefix_token_id: token in front of a text without a context; None: BOS, or else EOS.
        think_end_token: end of the thoughts, as text or id, up to which generated text is left out.
        enable_thinking: variable of the chat template; true needs `think_end_token`.
        chat_template_args: further variables of the chat template.
        peft: folder of a LoRA adapter.
        device: device of the harness: cuda, cuda:0 or cpu.
        trust_remote_code: must be false.
        options: arguments of `Engine`; sizes of a batch are not used, as the engine plans its steps.

    Raises:
        EvaluationError: an argument is unknown or invalid, or the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        peft: str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        with _errors():
            if trust_remote_code:
                raise UsageError("`trust_remote_code`: batchgen does not run code of a checkpoint; leave it out")
            if enable_thinking and think_end_token is None:
                raise UsageError("`enable_thinking` needs `think_end_token`, behind which the answer begins")
            place = _DEVICES.get(device, device)
            if place not in ("auto", "cpu"):
                raise UsageError(f"`device` is {device!r}; it may be cuda or cpu: choose a GPU by CUDA_VISIBLE_DEVICES")
            given = {"repetition_penalty_scope": "prompt+output", **options}  # as in transformers
            given |= {} if peft is None else {"lora": {_ADAPTER: peft}}
            given = {name: value for name, value in given.items() if name not in ("batch_size", "max_batch_size")}
            self._engine = Engine(pretrained, device=place, **given)
            self.tokenizer = _library_tokenizer(self._engine, add_bos_token)
            context = self._engine.model.spec.context_length
            self.max_length = context if max_length is None else max_length
            if not 0 < self.max_length <= context:
                raise UsageError(f"`max_length` is {max_length}, and the model's context is {context}; give less")
        self.max_gen_toks = max_gen_toks
        self._row = {} if peft is None else {"lora_path": _ADAPTER}
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self._think_end, self._enable_thinking = think_end_token, enable_thinking
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template_args = {**(chat_template_args or {}), **thinking}

    @property
    def eot_token_id(self) -> Any:
        """The tokenizer's EOS, or None."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token in front of a text without a context; an `EvaluationError` if there is none."""
        tokens = self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id
        token: int | None = next((token for token in tokens if token is not None), None)
        if token is None:
            raise EvaluationError("the tokenizer has no BOS and no EOS; name a token for this with `prefix_token_id`")
        return token

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness keeps requests that a chat template was applied to."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes of the model into its results."""
        dtype, kernels = str(self._engine.model.spec.dtype), self._engine.kernels
        return {"model_dtype": dtype, "batchgen_version": __version__, "batchgen_kernels": kernels}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a text that begins with the prefix token gets no other special tokens."""
        if add_special_tokens is None:
            return self._encode(string, self.tokenizer.decode(self.prefix_token_id))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _encode(self, text: str, begin: str | None) -> list[int]:
        add = False if begin is not None and text.startswith(begin) else self._add_bos_token
        return list(self.tokenizer.encode(text, **({} if add is None else {"add_special_tokens": add})))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, without its system message if the template refuses that."""
        if not self.tokenizer.chat_template:
            raise EvaluationError("the model has no chat template: leave --apply_chat_template out")

        def render(messages: list[dict[str, str]]) -> str:
            ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **ends, **self._template_args))

        try:
            return render(chat_history)
        except jinja2.TemplateError:
            return render([message for message in chat_history if message["role"] != "system"])

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of the logprobs, whether it is the greedy answer) of the continuation of each request."""
        if self._enable_thinking:
            raise EvaluationError("`enable_thinking` is for tasks that generate: leave it out here")
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """As `loglikelihood`, of (texts or None, ids of the context, ids of the continuation)."""
        rows = []
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                size = f"{len(context)} tokens of context and {len(continuation)} of continuation"
                raise EvaluationError(f"request {number} has {size}, which must be 1 to {self.max_length}")
            ids = (context + continuation)[-(self.max_length + 1) :]
            border = len(ids) - len(continuation)
            rows.append({**self._row, "input_ids": ids[:border], "completion": ids[border:]})
        answers: list[Any] = [None] * len(rows)
        for done in self._run(rows, "loglikelihood", disable_tqdm):
            assert done.scores is not None
            (score,) = done.scores
            assert isinstance(score, Score)
            answer = answers[done.row_index] = (score.sum, score.is_greedy)
            if (texts := requests[done.row_index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Sum of the logprobs of all tokens of each text, in windows of `max_length` tokens."""
        windows, numbers = list[Any](), list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            numbers += [number] * (len(windows) - len(numbers))
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(numbers, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated text of each request, up to its first stop string."""
        rows, stops = [], []
        for request in requests:
            row, until = self._generation(*request.args)
            rows.append(row)
            stops.append(until)
        texts = [""] * len(rows)
        for done in self._run(rows, "generate_until", disable_tqdm):
            number, ids = done.row_index, list(done.output_ids or ())
            if isinstance(self._think_end, int) and self._think_end in ids:
                ids = ids[len(ids) - ids[::-1].index(self._think_end) :]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            text, marker = (text.lstrip(), None) if isinstance(self._think_end, int) else (text, self._think_end)
            texts[number] = postprocess_generated_text(text, stops[number], marker)
            self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _generation(self, context: str, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The row of a request that generates, and its stop strings."""
        fields: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        until = [stop for stop in handle_stop_sequences(fields.pop("until"), eos) if stop]
        limit = fields.pop("max_gen_toks")
        if limit >= self.max_length:
            raise EvaluationError(f"`max_gen_toks` is {limit}, and the context is {self.max_length}; give less")
        if not fields.pop("do_sample"):
            fields["temperature"] = 0.0
        if unknown := sorted(fields.keys() - PARAMETERS | fields.keys() & {"n", "best_of"}):
            known = "the sampling fields of batchgen's rows, `until`, `do_sample` and `max_gen_toks`"
            raise EvaluationError(f"`{unknown[0]}` is not an argument of generation; there are {known}")
        ids = self._encode(context, self.tokenizer.bos_token)[limit - self.max_length :]
        row = {"input_ids": ids, "max_new_tokens": limit, "stop": until[:MAX_STOPS]}
        return {**self._row, **row, **fields}, until

    def _run(self, rows: Sequence[Mapping[str, Any]], what: str, disable_tqdm: bool) -> Iterator[Completion]:
        """The completions of rows, in the order in which they end; an `EvaluationError` if a row has an error."""
        with _errors(), tqdm(total=len(rows), desc=f"Running {what} requests", disable=disable_tqdm) as bar:
            for done in self._engine.generate(rows, progress=False):
                if done.error is not None:
                    raise UsageError(f"request {done.row_index}: {done.error.message}")
                bar.update()
                yield done


def _library_tokenizer(engine: Engine, add_bos_token: bool | None) -> Any:
    """The tokenizer of the engine as transformers loads it, for texts as the model `hf` has them."""
    folder = engine.tokenizer.folder
    if folder.is_file():
        raise UsageError(f"{folder} has no tokenizer for the harness: name a folder that has it with `tokenizer`")
    from transformers import AutoTokenizer  # slow to import

    options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    with library_errors(f"the tokenizer of {folder} cannot be loaded"):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
