"""What the server of `runner` imports before it forks: all that a run of a native model imports, some of it lazily."""

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401

import batchgen.cli.app
import batchgen.data.merge
import batchgen.job.run
import batchgen.job.show  # noqa: F401
