"""The GPU check: `python -m tests.gpu` on a machine with an NVIDIA GPU, without a network.

    python -m tests.gpu --out tests/gpu/figures

Stages, in this order, which share the time limit (`budget`):

    parity       every kernel, called through `batchgen.kernels.ops`, compared with float64 by the 2 x rule (`compare`)
    flash        the same attention cases through the vllm-flash-attn backend, if its library is installed
    engine       whole jobs with every kind of row: the GPU against the CPU, bfloat16 against transformers
    determinism  the same bits in every batch
    syncs        steady decode steps in which the host never waits for the device
    memory       the automatic pool, long and short rows in one pool, steps that do not fit
    bench        microbenchmarks at real shapes, compared with floors from the device's measured rates
    workloads    whole jobs at real shapes, compared with floors and other engines; slowdowns by row options; start-up
    profile      the time of a decode step by kernel
    tune         only if named: tile candidates of the attention kernels, printed as a fragment for `chips.toml`

Parity and bench need only torch and Triton. Whole jobs need the engine's requirements; optional ones may be absent.

Exit code 0: all requested stages ran and every check passed. 1: a check failed, has no kernel or was not reached in
time, or a stage raised an error. 2: no CUDA device, and no `--toy`.

`--toy` runs everything on the CPU at sizes of a few rows, kernels in Triton's interpreter, with a wall clock and a fake
flash library: it tests the command itself. Its figures, flagged `"toy": true`, mean nothing.

`figures/` has the reports of runs on real devices, a file `<gpu>-<date>-<commit>.json` per run (`report` describes the
contents; `table` makes the documentation's table from them). `notes.jsonl` has the results of tuning (`notes`).
"""
