"""Imports of the fork server of `runner`: everything that a command imports to run a native model."""

import gc
from contextlib import suppress
from importlib import import_module

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401

import batchgen.cli.app
import batchgen.data.out.compare
import batchgen.data.out.merge
import batchgen.job.check
import batchgen.job.preflight
import batchgen.job.results.export
import batchgen.job.results.show
import batchgen.job.results.verify
import batchgen.job.run
import batchgen.text.grammar.schemas.validation  # noqa: F401

# Imported lazily by libraries (pandas by pyarrow), and by each child that imports the tests' main module (pytest).
# Names may be missing in other versions of the libraries.
for name in ("jsonschema.validators", "pandas", "pydantic.type_adapter", "pytest", "typer._adapters", "xgrammar"):
    with suppress(ImportError):
        import_module(name)

gc.collect()
gc.freeze()  # else the first collection of each child copies all these objects' memory
