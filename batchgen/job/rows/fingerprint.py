"""Job fingerprint: a hash of everything that the results depend on, and the record in the output's footer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen import __version__
from batchgen.data.carry import carried_fields
from batchgen.data.lines import JOB_KEY, is_lines
from batchgen.data.read.input_files import AUTO_FORMAT
from batchgen.data.read.input_paths import partitions_of
from batchgen.data.read.input_set import InputSet
from batchgen.data.schema import SCHEMA_VERSION
from batchgen.data.store.job_changes import INPUT_FILES
from batchgen.data.store.work_folder import RunIdentity
from batchgen.errors import UsageError
from batchgen.job.preflight import carry_of
from batchgen.job.setup import Setup

RESULT_OPTIONS = (
    "deterministic",
    "hidden_states_dtype",
    "stop_on_repeat",
    "repetition_penalty_scope",
    "logprobs_mode",
    "lenient_schemas",
)
"""Options of the engine that change the results of every row."""
POOLING = ("pooling", "normalize")
"""Options of the engine that change embeddings."""
_ENGINE_FIELDS = ("max_model_len", "seed", "dedup", *RESULT_OPTIONS)
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
"""Options that results or the output's columns depend on; not batch sizes, memory or threads."""
_NEW_FIELDS = ("include_source", "strict_fields", "prompt_template", "columns", "image_column", "audio_column")
"""Further such options, which are left out at their defaults."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Fingerprint of a job, the values it was computed from, and the record for the footer key `batchgen.run`."""

    run: RunIdentity
    info: Mapping[str, Any]
    record: Mapping[str, Any]


def _options(setup: Setup) -> dict[str, Any]:
    """The options that change results or the job, by name; new ones are left out at their defaults, for equal
    fingerprints with older versions.
    """
    config, rounding = setup.config, setup.spec.numbers.rounding
    options = {name: getattr(config.engine, name) for name in _ENGINE_FIELDS}
    options |= {name: getattr(config, name) for name in _RUN_FIELDS}
    news = {
        "quantization": rounding if rounding != "none" else None,
        "kv_dtype": config.engine.kv_dtype if config.engine.kv_dtype != "auto" else None,
        "pooling": config.engine.pooling if config.engine.pooling != "auto" else None,
        # Ranks add up parts of sums, so that another number of them gives other bits.
        "tensor_parallel": ranks if (ranks := setup.spec.ranks.count) > 1 and config.engine.deterministic else None,
        "clock": config.engine.clock,  # the creation time of the job, the default, cannot identify it
        "input_format": config.input_format if config.input_format != AUTO_FORMAT else None,
        **{name: getattr(config.engine, name) for name in ("chat_template_name", "ignore_template_options")},
        **{name: getattr(config, name) for name in _NEW_FIELDS},
    }
    options |= {name: value for name, value in news.items() if value}
    return options | ({} if config.engine.normalize is None else {"normalize": config.engine.normalize})


def identify_job(setup: Setup, inputs: InputSet) -> JobIdentity:
    """Compute the fingerprint of a job from its options, its model and its opened input files; loads no weights.

    Raises:
        UsageError: a name given by `--carry` cannot be a column of the output.
        ModelError: a file of weights cannot be hashed.
    """
    config, model, sampling = setup.config, setup.identity, setup.sampling
    # Source and digest: a processor whose code changes makes another job.
    processors = {name: [processor.source, processor.digest] for name, processor in setup.front_end.processors.items()}
    info = {
        "schema_version": SCHEMA_VERSION,
        # The digests identify the model; the path of its folder may differ between machines.
        **{f"model {name}": value for name, value in model.items() if name not in ("model", "model_digest")},
        **{f"sampling default {name}": value for name, value in sampling.items()},
        **{f"--{name.replace('_', '-')}": value for name, value in _options(setup).items()},
        **setup.model.folder.overrides.options,
        "--logit-processor": processors,
        # A file may be moved before a run is resumed: its content counts, its name does not.
        INPUT_FILES: [[f.size, f.content, *partitions_of(f.path)] for f in inputs.files],
    }
    normalized = json.loads(json.dumps(info, sort_keys=True, default=str))
    digest = hashlib.sha256(json.dumps(normalized, sort_keys=True).encode()).hexdigest()
    shard = (config.shard.index, config.shard.count) if config.shard else None
    record = {
        "version": __version__,
        **model,
        "deterministic": config.engine.deterministic,
        "quantization": setup.spec.numbers.quantization,
        **({"checkpoint_format": form} if (form := setup.checkpoint_format) is not None else {}),
        "sampling_defaults": dict(sampling),
        "logprobs_mode": config.engine.logprobs_mode,
        "logit_processors": processors,
        "inputs": [f.record() for f in inputs.files],
        "shard": shard,
        "fingerprint": digest,
        "job": normalized,
        "configuration": config.describe(),
    }
    carry = carry_of(config)
    names = () if isinstance(carry, str) else carry
    if is_lines(config.output) and JOB_KEY in names:
        raise UsageError(f"`--carry` {JOB_KEY}: each line of {config.output} names its job so; rename the field")
    carried = carried_fields(names, inputs.files, setup.columns)
    return JobIdentity(RunIdentity(digest, shard, carried), normalized, record)
