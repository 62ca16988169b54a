"""out = activation(x w^T + bias) + residual, tile by tile in a given order, with signals in and out.

    x [M, K]   w [N, K]   bias [N]   residual, pre, out [M, N]

Each program takes the tiles at, at + programs, ... of `order`. A tile may wait until its rows of x have arrived, goes
to `out` or to a place of its own, and adds one to the counter of its group when all of it is stored. K is summed in
steps of BLOCK_K from the first to the last, whatever the tiles, their order and M, so the bits don't depend on those.
"""

import triton
import triton.language as tl

from weft.kernels.triton.activations import activate
from weft.kernels.triton.signals import signal, wait_for


@triton.jit
def matmul_kernel(
    x, x_rows, w, bias, residual, pre, out, places, place_strides, order, group_of, done, done_at, ready, late,
    M, N, K, stride_x, stride_w, stride_residual, stride_pre, stride_out, tile_m, tile_n, tiles,
    ready_rows, ready_value, local_start, local_stop, limit_ns,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, THREADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`x_rows` and `places`, `place_strides`: rows of x and tiles of out by address. `done_at`: counters by address."""
    tile_cols = tl.cdiv(N, tile_n)
    for at in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if order is None:  # noqa: SIM108 - what is None chooses the branch when this is compiled
            tile = _swizzled(at, tl.cdiv(M, tile_m), tile_cols)
        else:
            tile = tl.load(order + at)
        m0 = tile // tile_cols * tile_m
        n0 = tile % tile_cols * tile_n
        m1 = tl.minimum(m0 + tile_m, M)
        n1 = tl.minimum(n0 + tile_n, N)
        arrived = tile >= 0
        if ready is not None:
            for block in range(m0 // ready_rows, tl.cdiv(m1, ready_rows)):
                local = (block * ready_rows >= local_start) & (tl.minimum((block + 1) * ready_rows, M) <= local_stop)
                if not local:
                    there = wait_for(ready + block, ready_value, limit_ns, late, block, THREADS, INTERPRET)
                    arrived = arrived & there
        if arrived:
            wide = tl.cdiv(n1 - n0, BLOCK_N)
            for part in range(tl.cdiv(m1 - m0, BLOCK_M) * wide):
                row = m0 + part // wide * BLOCK_M
                col = n0 + part % wide * BLOCK_N
                z = _product(
                    x, x_rows, w, row, col, m1, n1, K, stride_x, stride_w, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                )
                if bias is not None:
                    cols = col + tl.arange(0, BLOCK_N)
                    z += tl.load(bias + cols, mask=cols < n1, other=0.0).to(tl.float32)[None, :]
                if pre is not None:
                    _store(_at(pre, row, col, stride_pre), stride_pre, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
                z = activate(z, ACTIVATION)
                if residual is not None:
                    z += _load(
                        _at(residual, row, col, stride_residual), stride_residual, m1 - row, n1 - col, BLOCK_M, BLOCK_N
                    )
                if places is None:
                    _store(_at(out, row, col, stride_out), stride_out, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
                else:
                    place = tl.load(places + tile).to(tl.pointer_type(w.dtype.element_ty))
                    stride = tl.load(place_strides + tile)
                    _store(_at(place, row - m0, col - n0, stride), stride, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
            if done is not None:
                signal(done + tl.load(group_of + tile))
            if done_at is not None:
                signal(tl.load(done_at + tl.load(group_of + tile)).to(tl.pointer_type(tl.int32)))


@triton.jit
def _swizzled(at, rows, cols, BAND: tl.constexpr = 8):
    """Tiles in bands of a few rows, column by column: neighbours in time share rows of x and of w in the cache."""
    band = at // (BAND * cols)
    height = tl.minimum(rows - band * BAND, BAND)
    inside = at % (BAND * cols)
    return (band * BAND + inside % height) * cols + inside // height


@triton.jit
def _at(matrix, row, col, stride):
    """Where a block starts; the offsets inside it then fit 32 bits, which halves the registers that they take."""
    return matrix + tl.cast(row, tl.int64) * stride + col


@triton.jit
def _load(start, stride, height, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    return tl.load(start + (rows[:, None] * stride + cols[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(start, stride, z, height, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    tl.store(start + (rows[:, None] * stride + cols[None, :]), z.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x, x_rows, w, row, col, m1, n1, K, stride_x, stride_w, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] of x w^T in float32 from (row, col) on; rows from m1 and columns from n1 on are not read."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if x_rows is None:
        at_x = _at(x, row, 0, stride_x) + (rows[:, None] * stride_x + ks[None, :])
    else:
        starts = tl.load(x_rows + row + rows, mask=rows < m1 - row, other=0).to(tl.pointer_type(w.dtype.element_ty))
        at_x = starts[:, None] + ks[None, :]
    at_w = _at(w, col, 0, stride_w) + (cols[:, None] * stride_w + ks[None, :])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        some_x = tl.load(at_x + k, mask=(rows < m1 - row)[:, None] & (ks < K - k)[None, :], other=0.0)
        some_w = tl.load(at_w + k, mask=(cols < n1 - col)[:, None] & (ks < K - k)[None, :], other=0.0)
        total = tl.dot(some_x, tl.trans(some_w), total, input_precision=PRECISION)
    return total
