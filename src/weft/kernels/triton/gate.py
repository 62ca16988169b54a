"""out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]."""

import triton
import triton.language as tl

from weft.kernels.triton.activations import activate


@triton.jit
def gate_kernel(x, out, N, stride_x, stride_out, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    a = tl.load(x + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride_x + N + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + cols, (activate(a, ACTIVATION) * b).to(out.dtype.element_ty), mask=inside)
