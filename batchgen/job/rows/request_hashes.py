"""Hashes of requests: by them a run finds finished rows of an earlier job that it need not compute again.

A hash covers everything that a prompt's results depend on: its token ids or embeddings, the content of its images and
sounds, its sampling parameters, seed and limits, the adapter and the logit processor that it names, and the facts of
the model and the run that change every row (`environment`). A row's id counts through the seed that is derived from it.
What the input or the order of the rows adds (indexes, carried fields) is not covered: it is written again when a row is
reused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from struct import Struct
from typing import Any, Final

import numpy as np

from batchgen.data.schema import OutputRow
from batchgen.data.store.committed import first_of_prompt
from batchgen.data.store.reuse import Prompts, prompts_of
from batchgen.errors import row_error
from batchgen.job.rows.fingerprint import POOLING, RESULT_OPTIONS
from batchgen.job.rows.ingest import RowTexts
from batchgen.job.setup import Setup
from batchgen.models.check import CheckedModel
from batchgen.request.completion import Completion
from batchgen.request.fields.field import JSON_PARAMS
from batchgen.request.fields.params import SamplingParams
from batchgen.request.foreign_text import ForeignTextError, read_json
from batchgen.request.table.request_table import RequestTable

MODEL_FACTS: Final = ("config_digest", "weights", "tokenizer_digest", "eos_ids", "dtype", "implementation")
"""What of a model's identity changes the result of every row."""
_OPTIONAL_FACTS: Final = ("reasoning", "processor_digest", "sentence_files")
_DEFAULTS: Final = asdict(SamplingParams())
_BYTES: Final = 8
_NUMBERS: Final = Struct("<qii")
"""Seed, limit and start of the scored text of a request."""


def environment(setup: Setup) -> dict[str, Any]:
    """What changes the result of every row, as JSON values by the names that a refusal shows.

    Other options act on the request of a row (its prompt, its parameters, its limits), which is compared itself.
    """
    facts, config = setup.identity, setup.config
    settings = {f"model {name}": facts[name] for name in MODEL_FACTS}
    settings |= {f"--{name.replace('_', '-')}": getattr(config.engine, name) for name in RESULT_OPTIONS}
    # Left out otherwise, for equal hashes with older versions.
    settings |= {f"model {name}": facts[name] for name in _OPTIONAL_FACTS if name in facts}
    settings["--quantization"] = setup.spec.numbers.rounding  # "auto" is one of the other ways to compute
    if config.engine.kv_dtype != "auto":
        settings["--kv-dtype"] = config.engine.kv_dtype
    settings |= {
        f"--{name}": value for name in POOLING if (value := getattr(config.engine, name)) not in ("auto", None)
    }
    settings["--include-prompt-ids"] = config.include_prompt_ids
    if _context_changes_positions(setup.model):
        settings["--max-model-len"] = config.engine.max_model_len
    return settings


def _context_changes_positions(model: CheckedModel) -> bool:
    """Whether the model's positions are scaled by the length of the context; assumed for what transformers runs."""
    return model.native is None or model.native[0].rope.kind in ("longrope", "dynamic")


class RequestHashes:
    """Request hashes of a job's prompts, computed when they are asked for: some microseconds each.

    Args:
        setup: the job's setup.
        table: its prompts.
    """

    def __init__(self, setup: Setup, table: RequestTable) -> None:
        facts, adapters = environment(setup), setup.identity.get("adapters", {})
        if setup.spec.unscaled_context is not None and not setup.scales_positions(table):
            facts["positions"] = "unscaled"
        self._table = table
        self._begun = [_hash_of_params(setup, facts, adapters, params) for params in table.params]

    def of(self, row: int, prompt: int) -> int:
        """The hash of a prompt of the job."""
        requests = self._table.requests_of(row, prompt)
        return self._hash(requests.start, requests.stop)

    def all(self) -> Prompts:
        """The hashes of all prompts, in the table's order."""
        row, prompt = self._table.row_index, self._table.prompt_index
        starts = np.flatnonzero(first_of_prompt(row, prompt))
        ends = np.append(starts[1:], len(row))
        hashes = np.fromiter(map(self._hash, starts.tolist(), ends.tolist()), np.int64, len(starts))
        return prompts_of(row[starts], prompt[starts], hashes)

    def _hash(self, first: int, end: int) -> int:
        """One hash a prompt: each text that is scored with it is a separate request in the table."""
        digest = self._digest(first)
        if end > first + 1:
            digest = blake2b(b"".join(map(self._digest, range(first, end))), digest_size=_BYTES).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _digest(self, request: int) -> bytes:
        table = self._table
        params_id, *numbers = table.numbers(request)
        digest = self._begun[params_id].copy()
        digest.update(_NUMBERS.pack(*numbers))
        digest.update(table.prompt_ids(request))
        for number in table.media_of(request):
            assert table.media is not None
            item = table.media[number]
            digest.update(f"{item.digest} {item.features}".encode())
        hashed: bytes = digest.digest()
        return hashed if table.embeds_id is None else _with_embeds(table, request, hashed)


def output_rows(group: Sequence[Completion], texts: RowTexts, hashes: RequestHashes) -> list[OutputRow]:
    """What is written of the samples of one prompt; its row's error if that raises."""
    first = group[0]
    row_id = f"row-{first.row_index}"
    try:
        row_id, extra, prompts = texts[first.row_index]
        prompt = prompts[first.prompt_index] if prompts else None
        request_hash = None if first.error is not None else hashes.of(first.row_index, first.prompt_index)
    except Exception as error:
        info = row_error(error, "reading the row's id and carried fields again")
        done = Completion(first.row_index, first.prompt_index, error=info, seed=first.seed)
        return [OutputRow(done, row_id)]
    return [OutputRow(completion, row_id, extra, prompt, request_hash) for completion in group]


def _hash_of_params(setup: Setup, facts: Mapping[str, Any], adapters: Mapping[str, str], params: SamplingParams) -> Any:
    """A hash of the environment and a parameter set, to be continued; fields at their defaults do not count."""
    named = {name: value for name, value in asdict(params).items() if value != _DEFAULTS[name]}
    for name in JSON_PARAMS & named.keys():
        with suppress(ForeignTextError):
            named[name] = read_json(named[name])  # its spaces do not count
    parts: dict[str, Any] = {"environment": facts, "params": named}
    if params.lora_path is not None:
        parts["adapter"] = adapters[params.lora_path]
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
