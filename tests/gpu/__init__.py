"""The GPU check: `python -m tests.gpu` on a machine with an NVIDIA GPU, without a network.

    python -m tests.gpu --out tests/gpu/figures

The stages, in the order of the table in `budget`, which says what each shows, share the time limit: checks first, then
measurements, then `tune`, which runs only if named.

Parity and bench need only torch and Triton. Whole jobs need the engine's requirements; optional ones may be absent.

Exit code 0: all requested stages ran and every check passed. 1: a check failed, has no kernel or was not reached in
time, or a stage raised an error. 2: no CUDA device, and no `--toy`.

`--toy` runs everything on the CPU at sizes of a few rows, kernels in Triton's interpreter, with a wall clock and a fake
flash library: it tests the command itself. Its figures, flagged `"toy": true`, mean nothing.

`figures/` has the reports of runs on real devices, a file `<gpu>-<date>-<commit>.json` per run (`report` describes the
contents; `table` makes the documentation's table from them).
"""
