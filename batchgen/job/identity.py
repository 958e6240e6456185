"""What makes two runs the same job: the fingerprint, and the facts that the output's footer records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen import __version__
from batchgen.config import RunConfig
from batchgen.data.carry import carried_fields
from batchgen.data.read import InputSet
from batchgen.data.schema import SCHEMA_VERSION
from batchgen.data.work import RunIdentity
from batchgen.processors import load_processors

__all__ = ["JobIdentity", "identify"]

_ENGINE_FIELDS = (
    "max_model_len",
    "seed",
    "dedup",
    "deterministic",
    "hidden_states_dtype",
    "stop_on_repeat",
    "repetition_penalty_scope",
    "logprobs_mode",
    "lenient_schemas",
)
_RUN_FIELDS = (
    "sampling_defaults",
    "prompt_column",
    "id_column",
    "chat",
    "system",
    "truncate",
    "carry",
    "include_prompt",
    "include_prompt_ids",
    "limit",
    "offset",
    "sample",
    "on_bad_row",
    "on_duplicate_id",
)
"""Options that a row's result or the output's shape depends on. Batch sizes, memory and threads do not belong here."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The fingerprint, what it was made from, and the record that the output's footer keeps under `batchgen.run`."""

    run: RunIdentity
    info: Mapping[str, Any]
    record: Mapping[str, Any]


def identify(config: RunConfig, inputs: InputSet, model: Mapping[str, Any], sampling: Mapping[str, Any]) -> JobIdentity:
    """Fingerprint a job before any weight is read.

    Args:
        config: the resolved configuration.
        inputs: opened and hashed.
        model: digests of model, tokenizer and template, end-of-sequence ids, resolved dtype and implementation.
        sampling: the sampling defaults in force (the model's, under the run-wide ones).
    """
    options = {name: getattr(config.engine, name) for name in _ENGINE_FIELDS}
    options |= {name: getattr(config, name) for name in _RUN_FIELDS}
    if config.engine.quantization != "none":  # jobs without it are those of versions that had none
        options["quantization"] = config.engine.quantization
    # Where each comes from, and what stands there: a processor that was rewritten makes another job.
    processors = {
        name: [found.source, found.digest] for name, found in load_processors(config.engine.logit_processor).items()
    }
    info = {
        "schema_version": SCHEMA_VERSION,
        # The digest says which model it is; its folder may stand elsewhere on another machine.
        **{f"model {name}": value for name, value in model.items() if name != "model"},
        **{f"sampling default {name}": value for name, value in sampling.items()},
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
        "--logit-processor": processors,
        # A file may be moved between a run and its resumption: its content counts, its name does not.
        "input files": [[f.size, f.sha256] for f in inputs.files],
    }
    plain = json.loads(json.dumps(info, sort_keys=True, default=str))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    shard = (config.shard.index, config.shard.count) if config.shard else None
    record = {
        "version": __version__,
        **dict(model),
        "deterministic": config.engine.deterministic,
        "quantization": config.engine.quantization,
        "sampling_defaults": dict(sampling),
        "logprobs_mode": config.engine.logprobs_mode,
        "logit_processors": processors,
        "inputs": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in inputs.files],
        "shard": shard,
        "fingerprint": digest,
        "configuration": config.describe(),
    }
    names = () if isinstance(config.carry, str) else config.carry
    carried = carried_fields(names, inputs.files, config.prompt_column, config.id_column)
    return JobIdentity(RunIdentity(digest, shard, carried), plain, record)
