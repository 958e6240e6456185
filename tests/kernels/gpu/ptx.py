"""What PTX, the assembly of compiled kernels, says of them."""

from __future__ import annotations

import re

_LOADS = re.compile(r"ld\.global[\w.:]*?(?:\.v([248]))?\.[bfsu](8|16|32|64)\b")
_COPIES = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)[,;]")


def widest_load(ptx: str) -> int:
    """Most bytes of one load from global memory, or of one copy to shared memory, by a thread; 0 without any."""
    loads = [int(vector or 1) * int(bits) // 8 for vector, bits in _LOADS.findall(ptx)]
    return max([*loads, *(int(size, 0) for size in _COPIES.findall(ptx))], default=0)
