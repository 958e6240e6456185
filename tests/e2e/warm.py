"""What the server of `runner` imports before it forks: all that commands import for a native model, some of it late."""

import gc
from contextlib import suppress
from importlib import import_module

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401

import batchgen.cli.app
import batchgen.data.merge
import batchgen.data.replay
import batchgen.job.check
import batchgen.job.export
import batchgen.job.preflight
import batchgen.job.run
import batchgen.job.show
import batchgen.job.verify
import batchgen.text.validation  # noqa: F401

# What others import late, in this version of theirs: pandas by pyarrow for tenths of a second, pytest by every child
# that imports the main module of the tests.
for name in ("jsonschema.validators", "pandas", "pydantic.type_adapter", "pytest", "typer._adapters", "xgrammar"):
    with suppress(ImportError):
        import_module(name)

gc.collect()
gc.freeze()  # or every child's first collection would copy the memory of all that
