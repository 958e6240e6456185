"""Hashes of requests: by them a run finds finished rows of an earlier job that it need not compute again.

A hash covers everything that a prompt's results depend on: its token ids or embeddings, its sampling parameters, seed
and limits, the adapter and the logit processor that it names, and the facts of the model and the run that change every
row (`environment`). A row's id counts through the seed that is derived from it. What the input or the order of the
rows adds (indexes, carried fields) is not covered: it is written again when a row is reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batchgen.data.write.committed import first_of_prompt
from batchgen.job.setup import Setup
from batchgen.models.check import CheckedModel
from batchgen.request.foreign_text import ForeignTextError, read_json
from batchgen.request.params import SamplingParams
from batchgen.request.table import RequestTable

_MODEL_FACTS: Final = ("model_digest", "tokenizer_digest", "eos_ids", "dtype", "implementation")
_OPTIONS: Final = (
    "deterministic",
    "quantization",
    "hidden_states_dtype",
    "stop_on_repeat",
    "repetition_penalty_scope",
    "logprobs_mode",
    "lenient_schemas",
)
_DEFAULTS: Final = asdict(SamplingParams())
_JSON: Final = frozenset({"json_schema", "structural_tag", "custom_params"})
"""Parameters that are JSON text."""
_BYTES: Final = 8

Int64s = npt.NDArray[np.int64]


def environment(setup: Setup) -> dict[str, Any]:
    """What changes the result of every row, as JSON values by the names that a refusal shows.

    Other options act on the request of a row (its prompt, its parameters, its limits), which is compared itself.
    """
    facts, config = setup.identity, setup.config
    found = {f"model {name}": facts[name] for name in _MODEL_FACTS}
    found |= {f"--{name.replace('_', '-')}": getattr(config.engine, name) for name in _OPTIONS}
    found["--include-prompt-ids"] = config.include_prompt_ids
    if _context_changes_positions(setup.model):
        found["--max-model-len"] = config.engine.max_model_len
    return found


def _context_changes_positions(model: CheckedModel) -> bool:
    """Whether the model's positions are scaled by the length of the context; assumed for what transformers runs."""
    return model.native is None or model.native[0].rope.kind in ("longrope", "dynamic")


def request_hashes(setup: Setup, table: RequestTable) -> tuple[Int64s, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Hashes of the prompts of a job, with their row and prompt indexes, [P] each, in the table's order.

    Takes about a microsecond per prompt.
    """
    facts = environment(setup)
    begun = [_hash_of_params(setup, facts, params) for params in table.params]
    fields = np.empty(len(table), [("seed", "<i8"), ("limit", "<i4"), ("score_start", "<i4")])
    fields["seed"], fields["limit"], fields["score_start"] = table.seed, table.max_new_tokens, table.score_start
    small, tokens = memoryview(fields.tobytes()), np.ascontiguousarray(table.tokens).view(np.uint8).data
    ends, params_id = (4 * table.offsets).tolist(), table.params_id.tolist()
    digests = []
    for i, number in enumerate(params_id):
        digest = begun[number].copy()
        digest.update(small[16 * i : 16 * i + 16])
        digest.update(tokens[ends[i] : ends[i + 1]])
        digests.append(digest.digest())
    if table.embeds_id is not None:
        digests = [_with_embeds(table, i, digest) for i, digest in enumerate(digests)]
    return _of_prompts(table, digests)


def _hash_of_params(setup: Setup, facts: Mapping[str, Any], params: SamplingParams) -> Any:
    """A hash of the environment and a parameter set, to be continued; fields at their defaults do not count."""
    named = {name: value for name, value in asdict(params).items() if value != _DEFAULTS[name]}
    for name in _JSON & named.keys():
        with suppress(ForeignTextError):
            named[name] = read_json(named[name])  # its spaces do not count
    parts: dict[str, Any] = {"environment": facts, "params": named}
    if params.lora_path is not None:
        parts["adapter"] = dict(setup.spec.adapters)[params.lora_path]
    if params.custom_logit_processor is not None:
        processor = setup.front_end.processors[params.custom_logit_processor]
        parts["processor"] = [processor.source, processor.digest]
    return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=_BYTES)


def _with_embeds(table: RequestTable, index: int, digest: bytes) -> bytes:
    prompt = table.embeds_of(index)
    if prompt is None:
        return digest
    assert table.embeds is not None
    values = table.embeds.rows(prompt.first, prompt.first + prompt.length)
    return blake2b(digest + values.tobytes(), digest_size=_BYTES).digest()


def _of_prompts(
    table: RequestTable, digests: list[bytes]
) -> tuple[Int64s, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """One hash a prompt: each text that is scored with a prompt is a separate request in the table."""
    row, prompt = table.row_index, table.prompt_index
    starts = np.flatnonzero(first_of_prompt(row, prompt))
    if len(starts) < len(digests):
        ends = [*starts[1:].tolist(), len(digests)]
        joined = [b"".join(digests[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)]
        digests = [each if len(each) == _BYTES else blake2b(each, digest_size=_BYTES).digest() for each in joined]
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64), row[starts], prompt[starts]
