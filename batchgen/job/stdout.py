"""`-o -`: the results of a job as JSON lines on stdout, at its end."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchgen.config.run_config import RunConfig
from batchgen.config.units import STDIN
from batchgen.data.files import open_named
from batchgen.data.lines import line_files
from batchgen.request.printable import EscapedJson

_NAME = "stdout.jsonl"


@contextmanager
def stdout_of(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with a file of lines in place of stdout, whose content is written to stdout at the end.

    The file is in the folder of `--work-dir` and stays there, so that the same command continues the job; without that
    option it is in a temporary folder, which is removed.
    """
    if config.output != Path(STDIN):
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
        path = (config.work_path or Path(folder)) / _NAME
        yield replace(config, output=path)
        for file in line_files(path):
            with open_named(file) as lines:
                EscapedJson(sys.stdout.buffer).writelines(lines)
