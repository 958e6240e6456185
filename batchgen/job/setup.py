"""Setup of a job before rows are read: model spec, front end and sampling defaults; no weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchgen import __version__
from batchgen.config.engine_config import EngineConfig
from batchgen.config.run_config import BY_NAME, RunConfig
from batchgen.data.files import files_in, followed
from batchgen.demo import model_path, named_model
from batchgen.engine.backend_choice import fixed_kernels, refuse_anywhere, refuse_kv_dtype
from batchgen.engine.engine import Engine
from batchgen.engine.front_end import FrontEnd
from batchgen.engine.machine import prepare_device
from batchgen.engine.media.job import plan_media
from batchgen.engine.memory.kv_budget import allowed_pages
from batchgen.engine.memory.offload import weight_bytes, with_stream
from batchgen.engine.parallel.peers import peers_of, ranks_of
from batchgen.engine.quantization import choose_numbers
from batchgen.job.preflight import DEMO, CheckedJob, carry_of
from batchgen.kernels.backend import GPU_BACKENDS
from batchgen.kernels.cpu.library import load_library
from batchgen.kernels.ranks import Ranks
from batchgen.models.base import ModelSpec
from batchgen.models.check import CheckedModel
from batchgen.models.checkpoint.file_hashes import FileHashes
from batchgen.models.checkpoint.model_files import TOKENIZER_FILES, resolve_model
from batchgen.models.checkpoint.quantized_formats import PlainTensors
from batchgen.models.load import DeviceName, checked_spec, load_checked, of_rank
from batchgen.models.media.encoder import tower_bytes
from batchgen.models.media.processor import processor_digest
from batchgen.models.native.own_integers import stored_sizes
from batchgen.request.fields.named_columns import NamedColumns
from batchgen.request.printable import format_size
from batchgen.request.rows.unknown_keys import CarriedOptions
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import RequestTable
from batchgen.text.chat.prompt_template import PromptTemplate
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.user_cache import library_version

DEMO_NOTE = "no --model given: running the demonstration model, a toy for small tasks (see `batchgen help models`)"

_SHOWN_TOKENS = 200
"""Tokens of a prompt that are shown with its answer."""
_FEATURE_LIBRARIES = ("torch", "transformers", "torchvision", "pillow", "soundfile", "soxr")
"""Libraries that compute features of images and sounds."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's options, model folder and spec, front end and row defaults."""

    config: RunConfig
    model: CheckedModel
    spec: ModelSpec
    front_end: FrontEnd
    defaults: RowDefaults
    hashes: FileHashes
    columns: NamedColumns
    """The fields that prompts, ids and media are read from."""

    def load_engine(self, is_wanted: Callable[[], bool] = lambda: True) -> Engine:
        """The engine of the job with its weights; on a GPU its kernels are compiled, too.

        Args:
            is_wanted: whether the engine will be used, asked once the weights are loaded; if not, nothing is compiled.

        Raises:
            ModelError: they cannot be loaded, or a file changed meanwhile, so that its digest is of other weights.
            UsageError: the model cannot be computed as the options ask.
        """
        peers = peers_of(self.config.engine, self.spec)
        made = Engine.from_front_end(load_checked(self.model, self.spec), self.front_end, peers)
        self.hashes.check_unchanged()  # int8 reads integers of the checkpoint, too
        if is_wanted():
            made.warm_up()
        return made

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling defaults in effect: options of the run over defaults of the model."""
        return {**self.defaults.model, **self.defaults.flags}

    @property
    def identity(self) -> Mapping[str, Any]:
        """Properties of the model that results depend on, for the fingerprint; waits until all weights are hashed.

        `model` and `model_digest` say nothing that the other entries do not.

        Raises:
            ModelError: a file of weights cannot be read, or changed since the checks.
        """
        model = self.config.engine.model
        tokenizer, folder, hashes = self.front_end.tokenizer, self.model.folder, self.hashes.done.result()
        reasoning, tools = self.front_end.encoder.reasoning, self.front_end.encoder.tools
        weights = {os.path.relpath(file, folder.path): hashes[file] for file in folder.files}
        adapters = {each.name: _digest([each.config_digest, hashes[each.weights]]) for each in self.model.adapters}
        return {
            "model": DEMO if named_model(model) == model_path() else model,
            "model_digest": _digest([folder.config_digest, weights]),
            "config_digest": folder.config_digest,
            "weights": weights,
            "tokenizer_digest": tokenizer.digest,
            "template_digest": tokenizer.template_digest,
            "eos_ids": sorted(tokenizer.eos_ids),
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "implementation": self.spec.implementation,
            **({"adapters": adapters} if adapters else {}),
            **({} if reasoning is None else {"reasoning": reasoning.format.name}),
            **({} if tools is None else {"tool_parser": tools.name}),
            **({} if (files := self.front_end.encoder.tasks.files.digest) is None else {"sentence_files": files}),
            **({} if (processor := processor_digest(folder)) is None else {"processor_digest": processor}),
        }

    @property
    def checkpoint_format(self) -> str | None:
        """The quantiser of the checkpoint and its encodings; None if the weights are stored in full."""
        plain = self.model.folder.plain
        return None if plain is None else str(plain)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, while they are read."""
        return weight_bytes(self.model, self.spec)

    @property
    def device_weight_bytes(self) -> int:
        """Bytes of memory of the device that weights take."""
        return self.weight_bytes if self.spec.stream is None else self.spec.stream.device_bytes

    @property
    def stored_sizes(self) -> Sequence[tuple[int, int]]:
        """(numbers, bytes) of each linear layer that keeps the numbers of the checkpoint."""
        native = self.model.native
        return () if native is None else stored_sizes(native[1], self.model.folder, self.spec.numbers.form)

    def tower_bytes(self, table: RequestTable) -> int:
        """Bytes of the weights that a job with these rows loads for images and sounds.

        Raises:
            ModelError: the towers cannot be built.
        """
        return 0 if table.media is None else tower_bytes(self.model.folder, self.spec)

    def note_rows(self, table: RequestTable, note: Callable[[str], None]) -> None:
        """Call `note` if no row uses the logprob options, or if short rows get other rotary frequencies than alone."""
        unused = [BY_NAME[name].flag for name in self.defaults.unused_logprob_options(table.params)]
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            note(f"{', '.join(unused)} {verb} no effect: no row returns logprobs; add --return-logprob")
        if not self.scales_positions(table):
            return
        is_shard, unscaled = self.config.shard is not None, self.spec.unscaled_context
        longest = "rows of other shards" if is_shard else f"the longest row ({table.longest:,} tokens with its output)"
        note(
            f"{longest} may be past the {unscaled} tokens that the model's unscaled rotary frequencies are for: all "
            f"rows get the scaled ones, also short rows; --max-model-len {unscaled} takes the unscaled ones"
        )

    def scales_positions(self, table: RequestTable) -> bool:
        """Whether rows get rotary frequencies for a longer context than the model's first ones are for.

        In a shard they do, since another one may have longer rows.
        """
        unscaled = self.spec.unscaled_context
        return unscaled is not None and (self.config.shard is not None or table.longest > unscaled)

    def media_plan(self, table: RequestTable) -> dict[str, Any] | None:
        """Fields of the `MediaPlan` of a table; None if no row has images or sounds."""
        plan = None if table.media is None else plan_media(table, self.front_end.media.audio_rate)
        return None if plan is None else asdict(plan)

    @property
    def features_key(self) -> str:
        """Equal where equal images and sounds have equal features: the model, its numbers, and what computes them."""
        model = {name: value for name, value in self.identity.items() if name != "model"}
        how = [self.spec.device.type, self.config.engine.deterministic, self.model.folder.overrides.options]
        return _digest([model, how, __version__, *map(library_version, _FEATURE_LIBRARIES)])

    def decode_prompt(self, ids: list[int]) -> str:
        """The text of a prompt with its special tokens, for `--include-prompt` and `check`."""
        return self.front_end.tokenizer.decode(ids, skip_special_tokens=False)

    def prompt_text(self, table: RequestTable, row: int, prompt: int) -> str | None:
        """The text of the end of a prompt of a table; None if it is of embeddings."""
        index = table.requests_of(row, prompt)[0]
        if table.embeds_id is not None and table.embeds_of(index) is not None:
            return None
        return self.decode_prompt(table.prompt_ids(index)[-_SHOWN_TOKENS:].tolist())


def prepare(
    job: CheckedJob,
    note: Callable[[str], None],
    *,
    compiling: Callable[[], AbstractContextManager[None]] | None = None,
    allow_missing_gpu: bool = False,
) -> Setup:
    """Load the tokenizer and resolve the defaults, without loading weights.

    Args:
        job: the checked job.
        note: called with each message for the user.
        compiling: gives the context in which CPU kernels are compiled, if they have to be.
        allow_missing_gpu: whether a GPU that this machine lacks is allowed, for jobs that run on another machine.

    Raises:
        ModelError: the model cannot be used.
        UsageError: an option does not fit the model.
    """
    config, engine, folder = job.config, job.config.engine, job.model.folder
    if engine.model is None:
        note(DEMO_NOTE)
    if config.shard is not None:
        _note_other_counts(followed(config.output), config.shard.count, note)
    prepare_device(engine)
    ranks = ranks_of(engine)
    model = of_rank(job.model, ranks)
    spec = _spec(engine, model, ranks, note, compiling, allow_missing_gpu)
    source = resolve_model(engine.tokenizer, files=TOKENIZER_FILES) if engine.tokenizer is not None else folder.path
    tokenizer = Tokenizer.load(source, model=folder.path, config=folder.config)
    front_end = FrontEnd.build(
        engine, spec, tokenizer, job.processors, name=str(model_path()), truncate=config.truncate
    ).of_folder(folder)
    if engine.clock is not None and tokenizer.clock_text is None:
        note("--clock has no effect: the model's chat template does not read the time")
    if config.sampling_defaults == "model" and (unapplied := tokenizer.generation.note) is not None:
        note(unapplied)
    defaults = front_end.defaults(
        config.sampling,
        sampling_defaults=config.sampling_defaults,
        chat=config.chat,
        system=config.system,
        events=config.events is not None,
    )
    carry = carry_of(config)
    options = CarriedOptions(() if isinstance(carry, str) else carry, strict=config.strict_fields)
    defaults = replace(defaults, prompt_column=config.prompt_column, carried_options=options)
    columns = config.named_columns
    if config.prompt_template is not None:
        columns = columns._replace(template=PromptTemplate(config.prompt_template))
    setup = Setup(config, model, spec, front_end, defaults, job.hashes, columns)
    if folder.note is not None:
        note(folder.note)
    if folder.plain is not None:
        note(_quantised_note(folder.plain, setup))
    return setup


def _spec(
    engine: EngineConfig,
    model: CheckedModel,
    ranks: Ranks,
    note: Callable[[str], None],
    compiling: Callable[[], AbstractContextManager[None]] | None,
    allow_missing_gpu: bool,
) -> ModelSpec:
    """The model's sizes and its numbers on the device; what this machine cannot run is refused before rows are read."""
    absent = allow_missing_gpu and _wants_gpu(engine) and not torch.cuda.is_available()
    device: DeviceName = "cuda" if absent else engine.device
    spec = checked_spec(
        model, dtype=engine.dtype, device=device, elsewhere=absent, kv_dtype=engine.kv_dtype, ranks=ranks
    )
    if absent:
        refuse_anywhere(engine)
        refuse_kv_dtype(engine, spec)
        note("this machine has no GPU: --attention, --kv-memory, --offload and the compute time are not checked")
        return spec
    if spec.device.type == "cpu" and engine.attention != "torch":
        load_library(compiling)
    fixed_kernels(engine, spec)
    if engine.kv_budget is not None and engine.offload not in ("auto", "kv"):
        allowed_pages(spec, engine.page_size, engine.kv_budget)
    return with_stream(engine, model, replace(spec, numbers=choose_numbers(engine, model, spec)))


def _note_other_counts(out: Path, count: int, note: Callable[[str], None]) -> None:
    """Call `note` if the folder of a shard's output holds results of another number of shards."""
    files = files_in(out, "part-*-of-*.parquet")
    if others := [file.name for file in files if not file.name.endswith(f"-of-{count:05d}.parquet")]:
        more = f" and {len(others) - 1:,} more" if others[1:] else ""
        note(
            f"{out} holds results of another number of shards than {count}: {others[0]}{more}. They are not joined "
            "with this shard's: remove them, or give another -o"
        )


def _quantised_note(plain: PlainTensors, setup: Setup) -> str:
    """How the weights of a quantised checkpoint are computed, and what memory they take."""
    form, dtype = setup.spec.numbers.form, str(setup.spec.dtype).removeprefix("torch.")
    own = f"{len(setup.stored_sizes)} of its linear layers"
    what, more = f"its weights are dequantized to {dtype} as they are read", ""
    if form == "weight-only":
        what = f"{own} are computed from its own numbers, and others in {dtype}"
    elif form == "integers":
        what = f"{own} are computed in its own integers, with inputs rounded to int8, and others in {dtype}"
    elif form == "int8":
        more = f"; then weights are quantized to int8, {own} to the checkpoint's own integers"
    sizes = f"{format_size(plain.nbytes)} stored, {format_size(setup.weight_bytes)} in memory"
    return f"the checkpoint is quantized ({plain}): {what}, {sizes}{more}"


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _wants_gpu(engine: EngineConfig) -> bool:
    return engine.device == "cuda" or (engine.device == "auto" and engine.attention in GPU_BACKENDS)
