"""Imports of the fork server of `runner`: everything that a command imports to run a native model."""

import gc
from contextlib import suppress
from importlib import import_module

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401

import batchgen.cli.app
import batchgen.data.compare
import batchgen.data.merge
import batchgen.job.check
import batchgen.job.export
import batchgen.job.preflight
import batchgen.job.run
import batchgen.job.show
import batchgen.job.verify
import batchgen.text.grammar.validation  # noqa: F401

# Imported lazily by libraries (pandas by pyarrow), and by each child that imports the tests' main module (pytest).
# Names may be missing in other versions of the libraries.
for name in ("jsonschema.validators", "pandas", "pydantic.type_adapter", "pytest", "typer._adapters", "xgrammar"):
    with suppress(ImportError):
        import_module(name)

gc.collect()
gc.freeze()  # else the first collection of each child copies all these objects' memory
