"""The other half of a wait: a kernel that says in stream order that something has arrived."""

import triton
import triton.language as tl

from weft.kernels.triton.signals import signal


@triton.jit
def tell_kernel(counters, first):
    """One program for each counter first, first + 1, ...: adds one, and releases what earlier kernels have stored."""
    signal(counters + first + tl.program_id(0))
