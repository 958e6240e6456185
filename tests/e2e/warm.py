"""What the server of `runner` imports before it forks: all that commands import for a native model, some of it late."""

import gc

import jsonschema.validators  # noqa: F401
import pandas  # noqa: F401  # pyarrow does where it is installed, for tenths of a second
import pydantic.type_adapter  # noqa: F401
import pytest  # noqa: F401  # every child imports the main module of the tests, unless xdist runs them
import typer._adapters  # noqa: F401
import xgrammar  # noqa: F401
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

gc.collect()
gc.freeze()  # or every child's first collection would copy the memory of all that
