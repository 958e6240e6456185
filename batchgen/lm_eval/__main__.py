"""`python -m batchgen.lm_eval`: the command of lm-eval, with `--model batchgen` also where it reads no entry points."""

from batchgen.lm_eval.model import register

register()

from lm_eval.__main__ import cli_evaluate  # noqa: E402 the module above says if lm-eval is missing

cli_evaluate()
