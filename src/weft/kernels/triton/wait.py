"""The waiter: a kernel that holds a stream back until a group of tiles is stored."""

import triton
import triton.language as tl

from weft.kernels.triton.signals import wait_for


@triton.jit
def wait_kernel(counters, values, first, limit_ns, late, THREADS: tl.constexpr, INTERPRET: tl.constexpr):
    """One program for each counter first, first + 1, ...: done when all have reached their values, or at a deadline."""
    index = first + tl.program_id(0)
    wait_for(counters + index, tl.load(values + index), limit_ns, late, index, THREADS, INTERPRET)
