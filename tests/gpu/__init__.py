"""The GPU check: `python -m tests.gpu` on a machine with an NVIDIA GPU, without a network.

    python -m tests.gpu --out tests/gpu/figures

Stages, in this order, which share the time limit (`budget`):

    parity       every kernel, called through `batchgen.kernels.ops`, against float64 by the 2 x rule (`compare`)
    flash        the same attention cases through the vllm-flash-attn backend, where its library is there
    engine       whole jobs with every kind of row: the GPU against the CPU, bfloat16 against transformers
    determinism  the same bits whatever runs beside a row
    syncs        steady decode steps in which the host never waits for the device
    memory       the automatic pool, long and short rows in one pool, steps that do not fit
    bench        microbenchmarks at real shapes against floors made of the device's own measured rates
    workloads    whole jobs at real shapes beside floors and peers, what special rows cost, the start
    profile      where a decode step's time goes
    tune         only when named: tile candidates of the attention kernels, printed as a fragment for `chips.toml`

Kernels need torch and Triton alone; stages about whole jobs what the engine needs, less what is told to be absent.

Exit code 0: all that was asked for ran, and every check passed. 1: a check failed, is missing its kernel or was not
reached in time, or a stage broke. 2: no CUDA device, and no `--toy`.

`--toy` runs all of it on the CPU, kernels through Triton's interpreter, at sizes of a few rows, with a wall clock and a
stand-in for the flash library: it proves that this command works. Its figures, flagged `"toy": true`, mean nothing.

`figures/` holds what was measured on real devices, a file `<gpu>-<date>-<commit>.json` per run (`report` describes the
contents; `table` makes the README's table of it). The folder comes with the first of them. `notes.jsonl` holds what
tuning taught (`notes`).
"""
