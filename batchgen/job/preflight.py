"""What can be refused before torch is loaded, which alone takes seconds."""

from __future__ import annotations

from batchgen.config import RunConfig
from batchgen.data.inputs import check_inputs
from batchgen.data.own import own_files
from batchgen.demo import model_path
from batchgen.job.written import check_written
from batchgen.models.check import check_model
from batchgen.processors import load_processors

__all__ = ["refuse_early"]


def refuse_early(config: RunConfig) -> None:
    """Check the model folder whole (files, headers, architecture; adapters too), look at the inputs, import processors.

    Raises:
        ModelError: naming what is wrong and the remedy.
        InputError: an input is missing, unreadable or of an unknown kind.
        UsageError: an input is a file of the job's own output, events or the report would go over another file of the
            job, or a logit processor cannot be imported.
        OutputError: the report cannot be written where it is named.
    """
    engine = config.engine
    check_model(
        engine.model or model_path(),
        implementation=engine.model_impl,
        max_model_len=engine.max_model_len,
        revision=engine.revision,
        lora=engine.lora,
    )
    check_inputs(config.inputs, own_files(config))
    check_written(config)
    load_processors(engine.logit_processor)  # last: a processor may well import torch itself
