"""Whether a job is finished already, without the seconds that it takes to import torch and transformers.

A job's fingerprint follows from its options, the files that it reads, the installed libraries and the machine. The
user's cache folder keeps the fingerprint of each job that ran, by a digest of all these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from batchgen import __version__
from batchgen.config.urls import path_of
from batchgen.data.files import exists
from batchgen.data.read.input_paths import partitions_of
from batchgen.data.read.input_set import InputSet, open_inputs
from batchgen.data.results_file import intact_footer
from batchgen.data.schema import SCHEMA_VERSION
from batchgen.data.store.work_folder import RunIdentity, output_paths
from batchgen.data.store.work_owner import is_done
from batchgen.job.preflight import CheckedJob, selection_of, wait_for_hashes
from batchgen.job.signals import StopRequest
from batchgen.job.summary import RunSummary, finished_summary
from batchgen.models.checkpoint.file_hashes import file_digests
from batchgen.models.checkpoint.model_files import TOKENIZER_FILES, resolve_model
from batchgen.user_cache import keep_value, kept_value, library_version, machine_words

_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken", "jinja2")
"""Libraries that read a model's configuration, tokenizer and chat template."""
_COMPANIONS: Final = (*TOKENIZER_FILES, "*tiktoken*", "*/*.jinja")
"""Files of a model folder that are read in addition to its weights."""


@dataclass(frozen=True, slots=True)
class OpenedCommand:
    """A checked job with its hashed inputs, and digests of the model's other files from before they are read."""

    job: CheckedJob
    inputs: InputSet
    companions: tuple[tuple[str, str], ...]
    loaded: tuple[Any, Any] | None = None
    """`Setup` of the job, and an `Engine` that other jobs use, too; None: the run makes them."""

    @classmethod
    def of(cls, job: CheckedJob) -> Self:
        """Hash the inputs of a job.

        Raises:
            InputError: as `open_inputs`.
        """
        return cls(job, open_inputs(job.inputs, include_source=job.config.include_source), _companions(job))

    def finished(self, note: Callable[[str], None], stop: StopRequest) -> RunSummary | None:
        """The summary of the output if it is known to be complete; None if a run has to look closer.

        Raises:
            OutputError: lines or hidden states of a complete output are missing.
            Interrupted: `stop` requests a stop.
            ModelError: a file of weights cannot be hashed.
        """
        config = self.job.config
        shard = None if config.shard is None else (config.shard.index, config.shard.count)
        paths = output_paths(config.output, shard, config.work_path)
        if config.existing == "overwrite" or not exists(paths.result) or exists(paths.work):
            return None
        wait_for_hashes(self.job.hashes, note, stop)
        fingerprint = kept_value(*self._entry())
        if fingerprint is None or not is_done(paths, RunIdentity(fingerprint, shard)):
            return None
        summary = self.summary(paths.result, fingerprint)
        return None if config.retry_errors and summary.rows_error else summary

    def start_helpers(self) -> None:
        """Start what the run will need and takes a while to start, before libraries are imported meanwhile."""
        from batchgen.text.chat.template_process import start_early  # not for a job that is finished

        start_early(self.job.model.folder.path)

    def summary(self, result: Path, fingerprint: str) -> RunSummary:
        """The summary of the complete output.

        Raises:
            OutputError: lines of an output of JSON lines are missing.
        """
        count = partial(self.inputs.count_selected, selection_of(self.job.config))
        return finished_summary(result, fingerprint, count, skips=self.job.config.on_bad_row == "skip")

    def keep(self, fingerprint: str) -> None:
        """Keep the fingerprint of the job for `finished`, unless a file has changed since the job was opened."""
        if _companions(self.job) == self.companions:
            keep_value(*self._entry(), fingerprint)

    def _entry(self) -> tuple[str, str, tuple[str]]:
        """Where the fingerprint is kept: by a digest of everything that it follows from."""
        job, config, hashes = self.job, self.job.config, self.job.hashes.done.result()
        parts: list[Any] = [
            (__version__, SCHEMA_VERSION, [library_version(name) for name in _LIBRARIES], machine_words()),
            {name: option["value"] for name, option in config.describe()["options"].items() if name != "existing"},
            (job.model.folder.config_digest, [(file.name, hashes[file]) for file in job.model.folder.files]),
            self.companions,
            [(each.name, each.config_digest, hashes[each.weights]) for each in job.model.adapters],
            [(name, processor.source, processor.digest) for name, processor in job.processors.items()],
            [(file.size, file.content, *partitions_of(file.path)) for file in self.inputs.files],
            # A run refuses to reuse an output of another model.
            None if config.reuse is None else (intact_footer(path_of(config.reuse)) or {}).get("job"),
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
        return "jobs", digest[:32], (digest,)


def _companions(job: CheckedJob) -> tuple[tuple[str, str], ...]:
    """(name, digest) of the files that tokenizer, chat template and further configurations are read from."""
    folders = [job.model.folder.path]
    if (tokenizer := job.config.engine.tokenizer) is not None:
        folders.append(resolve_model(tokenizer, files=TOKENIZER_FILES))
    return tuple(digest for folder in folders for digest in file_digests(folder, _COMPANIONS))
