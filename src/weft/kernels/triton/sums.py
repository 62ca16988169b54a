"""out = parts[0] + parts[1] + ...: the end of a reduce-scatter, summed in rank order, so the bits depend on no timing.

    parts [P, elements], each written by another rank; out [elements]

A program may first wait until every rank's part is there.
"""

import triton
import triton.language as tl

from weft.kernels.triton.signals import wait_for


@triton.jit
def sum_kernel(
    parts, out, bias, ready, late, elements, ranks, stride_parts, N, ready_value, limit_ns,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    arrived = elements > 0
    if ready is not None:
        for rank in range(ranks):
            there = wait_for(ready + rank, ready_value, limit_ns, late, rank, THREADS, INTERPRET)
            arrived = arrived & there
    if arrived:
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in range(ranks):
            total += tl.load(parts + rank * stride_parts + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
