"""The GPU check: `python -m tests.gpu` on a machine with an NVIDIA GPU, with nothing installed but torch and Triton.

    python -m tests.gpu --out tests/gpu/figures

Stages, in this order:

    parity  every kernel, called through `batchgen.kernels.ops`, against float64 by the 2 x rule (`compare`)
    flash   the same attention cases through the vllm-flash-attn backend, where its library is there
    bench   microbenchmarks at real shapes against floors made of the device's own measured rates
    tune    only when named: tile candidates of the attention kernels, printed as a fragment for `chips.toml`

Exit code 0: all that was asked for ran, and every parity check passed. 1: a parity check failed, is missing its kernel
or was not reached in time. 2: no CUDA device, and no `--toy`.

`--toy` runs all of it on the CPU through Triton's interpreter, at sizes of a few rows, with a wall clock and a stand-in
for the flash library: it proves that this command works. Its figures, flagged `"toy": true`, mean nothing.

`figures/` holds what was measured on real devices, a file `<gpu>-<date>-<commit>.json` per run (`report` describes the
contents). The folder comes with the first of them.
"""
