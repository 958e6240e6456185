"""What a job needs to know before it reads a row: the model's sizes, its tokenizer, the defaults in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen.config import EngineConfig, RunConfig
from batchgen.demo import model_path
from batchgen.engine.engine import prepare_device
from batchgen.engine.kernels import fixed_kernels, products_of, refuse_anywhere
from batchgen.engine.memory import allowed_pages
from batchgen.kernels.backend import GPU_BACKENDS
from batchgen.media_root import MediaRoot
from batchgen.models.base import Model, ModelSpec
from batchgen.models.check import check_model
from batchgen.models.load import inspect_model, load_model
from batchgen.options import BY_NAME
from batchgen.params import SamplingParams
from batchgen.rows import RowDefaults
from batchgen.text.encode import Encoder
from batchgen.text.grammars import Grammars
from batchgen.text.tokenizer import Tokenizer

__all__ = ["Setup", "prepare"]

DEMO_NOTE = "no --model given: running the demonstration model, a toy that does small tasks (see README)"


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's model (not loaded yet), tokenizer and defaults."""

    config: EngineConfig
    model: str
    """Folder or id, the demonstration model's where none was named."""
    spec: ModelSpec
    tokenizer: Tokenizer
    defaults: RowDefaults
    encoder: Encoder
    media_root: MediaRoot

    def load_model(self) -> Model:
        """Read the weights.

        Raises:
            ModelError: they cannot be read.
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
        """Sampling defaults in force: the model's, under the run-wide ones."""
        return {**self.defaults.model, **self.defaults.flags}

    @property
    def identity(self) -> Mapping[str, Any]:
        """What of the model a result depends on."""
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

    def note_unread(self, params: Iterable[SamplingParams], note: Callable[[str], None]) -> None:
        """Say which options are idle, where none of the rows, whose parameters these are, reads them."""
        unread = [BY_NAME[name].flag for name in self.defaults.unread(params)]
        if unread:
            verb = "says" if len(unread) == 1 else "say"
            note(f"{', '.join(unread)} {verb} nothing: no row returns logprobs; add --return-logprob")

    def decode_prompt(self, ids: list[int]) -> str:
        """Text of a prompt, special tokens included, for `--include-prompt` and `check`."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def prepare(config: RunConfig, note: Callable[[str], None], *, elsewhere: bool = False) -> Setup:
    """Check the model folder, read the tokenizer and settle the defaults; no weight is read.

    Args:
        config: the job.
        note: told what the user should know.
        elsewhere: the job is to run on another machine, so that a device that is not here is no error.

    Raises:
        ModelError: the model cannot be used, with the reason.
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
    )  # first: it refuses before torch is asked for anything
    folder = checked.folder.path
    absent = elsewhere and _wants_gpu(engine) and not torch.cuda.is_available()
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
        note("there is no GPU here: what depends on it (--attention, --kv-memory, the time) is not checked")
    else:
        fixed_kernels(engine, spec)  # refuses what this machine cannot run before a row is read
        if engine.kv_memory is not None:
            allowed_pages(spec, engine.page_size, engine.kv_memory)  # refuses now rather than after an hour of reading
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
