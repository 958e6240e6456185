"""Messages of the command line in the words of the Python API: no flag is left, and no advice that Python lacks."""

from __future__ import annotations

import pytest

from batchgen.config.python_words import in_python

MESSAGES = {
    "lower --kv-memory, --max-num-seqs or --max-tokens-per-step, or shorten the row": (
        "lower Engine argument `kv_memory`, `max_num_seqs` or `max_tokens_per_step`, or shorten the row"
    ),
    "`--attention flash` cannot run": "`attention=flash` cannot run",
    "`--flash-library /x/y.so`: no such file": "`flash_library=/x/y.so`: no such file",
    "Use --device cpu, or install": "Use Engine argument `device=cpu`, or install",
    "Use --model-impl auto or transformers.": "Use Engine argument `model_impl=auto` or transformers.",
    "or scale it: --rope-scaling '{\"a\": 1}'.": "or scale it: Engine argument `rope_scaling='{\"a\": 1}'`.",
    "raise --max-new-tokens (the default is 128), or": "raise `max_new_tokens` (the default is 128), or",
    "no room; shorten it, or allow --truncate left or right": "no room; shorten it",
    "make ids unique or run with --on-duplicate-id suffix": "make ids unique",
    "answers to `messages` or with --chat (--no-chat says so)": "answers to `messages`",
    "or every name with --any-model (and --retry-errors, if refused)": "or every name with Engine argument `any_model`",
    "use --max-time, for the whole run": "use the command's `max_time`, for the whole run",
    "two -- dashes": "two -- dashes",
    "nothing to change": "nothing to change",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_flags_become_arguments(message: str) -> None:
    assert in_python(message) == MESSAGES[message]
