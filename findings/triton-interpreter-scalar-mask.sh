#!/usr/bin/env bash
# Triton 3.9's interpreter refuses a store whose mask joins a block of conditions with one condition of a scalar.
#
# Versions: triton 3.6.0 and 3.9.0, torch 2.13.0, numpy 2.4.6, Python 3.11.
#
# Input: a kernel that loads a number and stores 4 values with the mask `(offsets < 3) & (number != 0)`, in Triton's
# interpreter (TRITON_INTERPRET=1). Compilers broadcast the scalar, so the mask is a block of one-bit conditions.
#
# Documented: masks are blocks of int1; `&` of a block and a scalar broadcasts the scalar.
# Behaviour: both versions say that the mask's type is int1, and hold it as int32. 3.6.0 stores; 3.9.0 ends the store with
# "mask has unsupported dtype". With the condition as a branch around the store both store.
#
# Output seen:
#   3.6.0: mask int1 of int32, mask stored, branch stored
#   3.9.0: mask int1 of int32, mask refused, branch stored
#
# Exits with 0 while this is so, and with 1 once 3.9.0 stores in both ways.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat >"$folder/probe.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def masked(number, out):
    offsets = tl.arange(0, 4)
    mask = (offsets < 3) & (tl.load(number) != 0)
    print("mask", mask.dtype, "of", mask.handle.data.dtype, end=", ")
    tl.store(out + offsets, offsets + 1, mask=mask)


@triton.jit
def branched(number, out):
    offsets = tl.arange(0, 4)
    if tl.load(number) != 0:
        tl.store(out + offsets, offsets + 1, mask=offsets < 3)


def result(kernel):
    out = torch.zeros(4, dtype=torch.int32)
    try:
        kernel[(1,)](torch.tensor([5]), out)
    except Exception as problem:
        return "refused" if "mask has unsupported dtype" in str(problem) else repr(problem)
    return "stored" if out.tolist() == [1, 2, 3, 0] else str(out.tolist())


print(f"{triton.__version__}: ", end="")
first = result(masked)
print(f"mask {first}, branch {result(branched)}")
PYTHON
cd "$folder"
for version in 3.6.0 3.9.0; do
  "$folder/venv/bin/pip" install -q --no-deps --target "$folder/$version" "triton==$version"
  TRITON_INTERPRET=1 PYTHONPATH="$folder/$version" "$folder/venv/bin/python" probe.py
done | tee seen.txt
diff seen.txt - <<'SEEN'
3.6.0: mask int1 of int32, mask stored, branch stored
3.9.0: mask int1 of int32, mask refused, branch stored
SEEN
