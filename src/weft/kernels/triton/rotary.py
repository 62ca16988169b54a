"""Turns heads by their positions: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves of a head.

x, out [T, H, D]   cos, sin [positions, D / 2] in float32   positions [T]
"""

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    x, out, cos, sin, positions, half, sign, stride_x, stride_out, stride_head, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < half
    position = tl.load(positions + token)
    c = tl.load(cos + position * half + at, mask=inside, other=0.0)
    s = tl.load(sin + position * half + at, mask=inside, other=0.0) * sign
    source = x + token * stride_x + head * stride_head + at
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + token * stride_out + head * stride_head + at
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
