"""The command line of the GPU check. Sets Triton's interpreter on or off before kernels are imported."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import warnings
from pathlib import Path

from tests.gpu.budget import DEFAULT_STAGES, STAGES, commands

_GRACE = 120.0
"""Seconds past the time limit after which a case counts as hung and the process exits."""


def main(words: list[str]) -> int:
    """Parse the options, run the stages, print and write the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Parity and benchmarks on a CUDA device.")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", default=",".join(DEFAULT_STAGES), help=f"comma-separated, from {', '.join(names)}")
    parser.add_argument("--toy", action="store_true", help="on the CPU, in Triton's interpreter, at toy sizes")
    parser.add_argument("--out", type=Path, help="a JSON file, or a folder for <gpu>-<date>-<commit>.json")
    parser.add_argument("--only", default="", help="run only cases whose name or operation contains this text")
    parser.add_argument("--time-limit", type=float, default=450.0, help="seconds for all stages together")
    parser.add_argument(
        "--flash-library", default="", help="a flash-attn library file, packed or not, or a folder of them"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, help="number of processes that check parity; 0: most cores, at most 10"
    )
    parser.add_argument("--shard", default="", help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="", help="commit to record, for a copy without .git")
    parser.add_argument("--plan", type=float, help="print the commands for a machine at hand for so many seconds")
    options = parser.parse_args(words)
    if options.plan is not None:
        print("\n".join(commands(options.plan)))
        return 0
    stages = options.stages.split(",")
    unknown = sorted(set(stages) - set(names))
    if unknown:
        parser.error(f"unknown stages: {', '.join(unknown)}; choose from {', '.join(names)}")
    if options.toy:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # The interpreter computes masked elements too, and numpy warns about them.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.*")
        from tests.gpu.interpreted import fix_row_summation_order, speed_up_interpreter

        speed_up_interpreter()
        fix_row_summation_order()
    else:
        # Interpreted kernels would run on the CPU, very slowly, and test nothing of the device.
        os.environ.pop("TRITON_INTERPRET", None)
    from tests.gpu.runner import NoDevice, Options, run

    gc.freeze()  # collections between the checks skip the imported modules
    if not options.toy:
        faulthandler.dump_traceback_later(options.time_limit + _GRACE, exit=True)
    try:
        report = run(
            Options(
                stages=stages,
                toy=options.toy,
                only=options.only,
                time_limit=options.time_limit,
                commit=options.commit,
                flash_library=options.flash_library,
                jobs=options.jobs or max(1, min(10, (os.cpu_count() or 1) * 5 // 8)),
                shard=options.shard,
            ),
            lambda report: report.write(options.out) if options.out is not None else None,
        )
    except NoDevice as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table())
    if options.out is not None:
        print(f"written: {report.write(options.out)}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
