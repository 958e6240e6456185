"""Setup of a job before rows are read: model spec, tokenizer, encoder and sampling defaults; no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen.config.options import BY_NAME
from batchgen.config.run_config import EngineConfig, RunConfig
from batchgen.demo import model_path
from batchgen.engine.backend_choice import fixed_kernels, products_of, refuse_anywhere
from batchgen.engine.engine import prepare_device
from batchgen.engine.memory.kv_budget import allowed_pages
from batchgen.kernels.backend import GPU_BACKENDS
from batchgen.media.root import MediaRoot
from batchgen.models.base import Model, ModelSpec
from batchgen.models.check import check_model
from batchgen.models.load import inspect_model, load_model
from batchgen.request.params import SamplingParams
from batchgen.request.parser import RowDefaults
from batchgen.text.encode import Encoder
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Setup", "prepare"]

DEMO_NOTE = "no --model given: running the demonstration model, a toy for small tasks (see `batchgen help models`)"


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's model spec, tokenizer, encoder and defaults."""

    config: EngineConfig
    model: str
    """Folder or id of the model; the demonstration model's folder if none is named."""
    spec: ModelSpec
    tokenizer: Tokenizer
    defaults: RowDefaults
    encoder: Encoder
    media_root: MediaRoot

    def load_model(self) -> Model:
        """Load the weights.

        Raises:
            ModelError: they cannot be loaded.
        """
        return load_model(
            self.model,
            implementation=self.config.model_impl,
            dtype=self.config.dtype,
            device=self.config.device,
            max_model_len=self.config.max_model_len,
            revision=self.config.revision,
            lora=self.config.lora,
            products=products_of(self.config),
        )

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling defaults in effect: options of the run over defaults of the model."""
        return {**self.defaults.model, **self.defaults.flags}

    @property
    def identity(self) -> Mapping[str, Any]:
        """Properties of the model that results depend on, for the fingerprint."""
        return {
            "model": self.config.model or "demonstration model",
            "model_digest": self.spec.digest,
            "tokenizer_digest": self.tokenizer.digest,
            "template_digest": self.tokenizer.template_digest,
            "eos_ids": sorted(self.tokenizer.eos_ids),
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "implementation": self.spec.implementation,
            **({"adapters": dict(self.spec.adapters)} if self.spec.adapters else {}),
        }

    def note_unused_options(self, params: Iterable[SamplingParams], note: Callable[[str], None]) -> None:
        """Call `note` if logprob options are given but none of the rows' parameter sets `params` uses them."""
        unused = [BY_NAME[name].flag for name in self.defaults.unused_logprob_options(params)]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            note(f"{', '.join(unused)} {verb} no effect: no row returns logprobs; add --return-logprob")

    def decode_prompt(self, ids: list[int]) -> str:
        """The text of a prompt with its special tokens, for `--include-prompt` and `check`."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def prepare(config: RunConfig, note: Callable[[str], None], *, allow_missing_gpu: bool = False) -> Setup:
    """Check the model, load the tokenizer and resolve the defaults, without loading weights.

    Args:
        config: the configuration of the job.
        note: called with each message for the user.
        allow_missing_gpu: whether a GPU that this machine lacks is allowed, for jobs that run on another machine.

    Raises:
        ModelError: the model cannot be used.
        UsageError: an option does not fit the model.
    """
    engine = config.engine
    if engine.model is None:
        note(DEMO_NOTE)
    model = engine.model or str(model_path())
    media_root = MediaRoot(engine.media_root)
    prepare_device(engine)
    implementation, longest = engine.model_impl, engine.max_model_len
    checked = check_model(
        model, implementation=implementation, max_model_len=longest, revision=engine.revision, lora=engine.lora
    )  # first: needs no torch
    folder = checked.folder.path
    absent = allow_missing_gpu and _wants_gpu(engine) and not torch.cuda.is_available()
    spec = inspect_model(
        folder,
        implementation=implementation,
        max_model_len=longest,
        dtype=engine.dtype,
        device="cuda" if absent else engine.device,
        lora=engine.lora,
        elsewhere=absent,
    )
    if absent:
        refuse_anywhere(engine)
        note("this machine has no GPU: --attention, --kv-memory and the compute time are not checked")
    else:
        fixed_kernels(engine, spec)  # raises before rows are read if this machine cannot run them
        if engine.kv_memory is not None:
            allowed_pages(spec, engine.page_size, engine.kv_memory)  # raises now rather than after all rows are read
    tokenizer = Tokenizer.load(engine.tokenizer or folder, engine.revision, folder)
    defaults = RowDefaults(
        flags=config.sampling,
        model=tokenizer.generation.sampling_defaults() if config.sampling_defaults == "model" else {},
        model_names=frozenset({model, Path(model).name}),
        adapters=frozenset(spec.adapters),
        chat=config.chat,
        system=config.system,
        events=config.events is not None,
        processors=frozenset(name for name, _ in engine.logit_processor),
    )
    encoder = Encoder(
        tokenizer,
        spec.vocab_size,
        spec.context_length,
        config.truncate,
        engine.seed,
        limits=spec.state_limits,
        grammars=Grammars(tokenizer, spec.vocab_size, lenient=engine.lenient_schemas),
    )
    return Setup(engine, model, spec, tokenizer, defaults, encoder, media_root)


def _wants_gpu(engine: EngineConfig) -> bool:
    return engine.device == "cuda" or (engine.device == "auto" and engine.attention in GPU_BACKENDS)
