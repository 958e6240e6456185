"""What the server of `runner` imports before it forks: all that a run imports one by one, some of it lazily."""

import torch._dynamo  # noqa: F401
import transformers.activations
import transformers.models.llama.configuration_llama
import transformers.tokenization_utils_tokenizers  # noqa: F401
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

import batchgen.cli.app
import batchgen.data.merge
import batchgen.job.run
import batchgen.job.show  # noqa: F401
