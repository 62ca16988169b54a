"""out = norm(x + bias + residual) * weight + beta, a row a program; x may lie in an order of communication.

    x, residual, total, out [M, N]   bias, weight, beta [N]   mean, rstd [M]; RMSNorm has no mean

With `starts` and `strides`, x is a flat buffer in pieces of piece_rows x piece_cols (see `order.py`), read in place.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, starts, strides, bias, residual, weight, beta, total, out, mean, rstd, N, eps, stride_x, stride_residual,
    stride_total, stride_out, piece_rows, piece_cols, pieces, RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    if starts is None:
        at = row * stride_x + cols
    else:
        piece = row // piece_rows * pieces + cols // piece_cols
        start = tl.load(starts + piece, mask=inside, other=0)
        at = start + row % piece_rows * tl.load(strides + piece, mask=inside, other=0) + cols % piece_cols
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        z += tl.load(residual + row * stride_residual + cols, mask=inside, other=0.0).to(tl.float32)
    if total is not None:
        tl.store(total + row * stride_total + cols, z.to(total.dtype.element_ty), mask=inside)
    if RMS:
        away = z
    else:
        centre = tl.sum(z, 0) / N
        away = tl.where(inside, z - centre, 0.0)
        if mean is not None:
            tl.store(mean + row, centre)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 0) / N + eps)
    y = away * scale
    if weight is not None:
        y *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if beta is not None:
        y += tl.load(beta + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + cols, y.to(out.dtype.element_ty), mask=inside)
    if rstd is not None:
        tl.store(rstd + row, scale)
