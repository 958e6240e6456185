"""`FrontEnd`: everything that turns rows into requests of one model, the same for a job and for `Engine.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from batchgen.config.engine_config import EngineConfig
from batchgen.engine.media.reader import MediaSupport, no_media
from batchgen.engine.row_reader import OnDuplicate, RowReader
from batchgen.media.root import MediaRoot
from batchgen.media.store import MediaLimits, MediaStore
from batchgen.media.urls import MediaUrls
from batchgen.models.base import Model, ModelSpec
from batchgen.models.checkpoint.folder import ModelFolder
from batchgen.models.embed.files import head_labels, sentence_files
from batchgen.models.embed.heads import TaskHeads, has_known_head
from batchgen.models.media.encoder import MediaEncoder, load_media_encoder
from batchgen.models.media.processor import find_media_processor
from batchgen.request.fields.hidden_states import StatePool
from batchgen.request.fields.params import PARAMETERS, SamplingParams
from batchgen.request.processors import LoadedProcessor
from batchgen.request.rows.model_names import ModelNames
from batchgen.request.rows.values import RowDefaults
from batchgen.request.table.request_table import RequestTable
from batchgen.request.tasks import TaskSupport
from batchgen.text.chat import template_process
from batchgen.text.encode import Encoder
from batchgen.text.families import AUTO
from batchgen.text.fit import Truncate
from batchgen.text.grammar import compiler
from batchgen.text.grammar.grammars import Grammars
from batchgen.text.reasoning import reasoning_of
from batchgen.text.tokens.tokenizer import Tokenizer
from batchgen.text.tools.rows import tool_parser_of


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Tokenizer, prompt encoder, grammars, processors and media of one model."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer
    processors: Mapping[str, LoadedProcessor]
    """Custom logit processors by name."""
    media_root: MediaRoot
    media_urls: MediaUrls
    """What rows may fetch."""
    grammars: Grammars
    """Compiled constraints of rows."""
    encoder: Encoder
    name: str
    """Name of the model, by which rows may name it."""
    media: MediaSupport
    """What the model offers for images and sounds."""
    folder: ModelFolder | None = None
    """The checkpoint, if it is known."""

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        processors: Mapping[str, LoadedProcessor],
        *,
        name: str | None = None,
        truncate: Truncate = "none",
        grammars: Grammars | None = None,
    ) -> FrontEnd:
        """The front end of a model with the run's options. The tokenizer's clock is set if `config` has one.

        `name`: of the model if `config` has none; `truncate`: side on which prompts that are too long are cut;
        `grammars`: compiled for the same model and options.

        Raises:
            UsageError: `media_root` is not a folder, `allow_media_url` is not the beginning of a URL, or `reasoning`,
                `tool_parser` or `chat_template_name` is not a name.
        """
        media = MediaRoot(config.media_root), MediaUrls(config.allow_media_url)
        if config.clock is not None:
            tokenizer.clock = datetime.fromisoformat(config.clock)
        tokenizer.use_template(config.chat_template_name, keep_unread=config.ignore_template_options)
        grammars = grammars or Grammars(tokenizer, spec.vocab_size, lenient=config.lenient_schemas)
        reasoning = reasoning_of(tokenizer, config.reasoning)
        sizes = spec.vocab_size, spec.context_length
        encoder = Encoder(
            tokenizer, *sizes, truncate, config.seed, spec.state_limits, grammars, reasoning, spec.context_reason
        )
        encoder.tools = tool_parser_of(tokenizer, config.tool_parser)
        encoder.calls_are_unknown = encoder.tools is None and config.tool_parser == AUTO
        called, support = config.model or name or "", no_media("its folder is not known")
        encoder.tasks = TaskSupport(spec.name, spec.generates, spec.hidden_size)
        return cls(config, spec, tokenizer, processors, *media, grammars, encoder, called, support)

    def of_folder(self, folder: ModelFolder) -> FrontEnd:
        """The front end with what a model's folder says of embeddings and scores, and the processor and the towers for
        media, which are looked for when needed.

        Raises:
            ModelError: a file of sentence-transformers cannot be read.
        """
        config, spec, tokenizer = self.config, self.spec, self.tokenizer
        causal = spec.bidirectional != "text"
        files = sentence_files(folder, causal=causal, pooling=config.pooling, normalize=config.normalize)
        scores: StatePool = "mean" if folder.config.get("classifier_pooling") == "mean" else "first"
        self.encoder.tasks = TaskSupport(
            spec.name,
            spec.generates,
            spec.hidden_size,
            files,
            labels=head_labels(folder.config) if has_known_head(folder) else (),
            scores="last" if causal else scores,
            separator=None if causal or not tokenizer.around_pair[3] else tokenizer.around_pair[1][0],
        )

        def load(model: Model) -> MediaEncoder:
            return load_media_encoder(folder, model.spec)

        media = MediaSupport(self.spec, partial(find_media_processor, folder), load, self.media_store)
        return replace(self, media=media, folder=folder)

    def heads(self) -> TaskHeads:
        """Read what follows the model in rows with a task.

        Raises:
            ModelError: weights are missing or cannot be read.
        """
        return TaskHeads(self.encoder.tasks.files, self.folder)

    @property
    def notes(self) -> list[str]:
        """What users should know of the rows that were read, a line each."""
        return [*self.tokenizer.chat_notes, *sorted(self.encoder.notes)]

    def release(self) -> None:
        """Stop the processes of grammars and templates to free their memory; they are started again when needed."""
        compiler.PROCESS.stop()
        template_process.PROCESS.stop()

    def defaults(
        self,
        flags: Mapping[str, Any],
        *,
        sampling_defaults: Literal["model", "openai"] = "model",
        chat: bool | None = None,
        system: str | None = None,
        events: bool = False,
    ) -> RowDefaults:
        """Defaults of the rows of one job. `flags`: sampling fields set for the whole run; others as in `RowDefaults`.

        `sampling_defaults`: whether the model's generation_config.json gives further defaults.

        Raises:
            ModelError: a value of generation_config.json is out of range.
            UsageError: a flag is.
        """
        generation = self.tokenizer.generation
        return RowDefaults(
            flags=flags,
            model=generation.sampling_defaults(self.spec.vocab_size) if sampling_defaults == "model" else {},
            names=ModelNames.of(self.name, self.config.served_model_name, accept_all=self.config.any_model),
            adapters=frozenset(self.spec.adapters),
            chat=chat,
            system=system,
            events=events,
            processors=frozenset(self.processors),
            template_reads=self.tokenizer.template_reads,
            ignore_template_options=self.config.ignore_template_options,
        )

    def media_store(self, audio_rate: int, folder: Path | None = None) -> MediaStore:
        """An empty store of the images and sounds of one job.

        `audio_rate`: of decoded sounds, in Hz; `folder`: of its temporary file; None uses the system's.
        """
        config = self.config
        limits = MediaLimits(config.max_image_pixels, config.max_audio_seconds, config.max_media_items)
        return MediaStore(self.media_root, limits, audio_rate, self.media_urls, folder)

    def row_reader(self, table: RequestTable, defaults: RowDefaults, on_duplicate: OnDuplicate = "error") -> RowReader:
        """A reader of rows into `table`."""
        return RowReader(table, self.encoder, defaults, on_duplicate, self.media_root, self.media)


def default_fields(params: SamplingParams | None) -> dict[str, Any]:
    """The fields of `params` as defaults for every row, without `seed` if it is None."""
    if params is None:
        return {}
    values = {name: getattr(params, name) for name in PARAMETERS}
    return values if params.seed is not None else {name: v for name, v in values.items() if name != "seed"}
