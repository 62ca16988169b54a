"""Row operations: norms, sums of table rows, rotary positions, gates, sums of ranks' parts. Kernels, then launchers.

The launchers have the arguments of `weft.kernels.cpu`. None of these has ever run on a GPU: they were run in Triton's
interpreter and compiled for the targets of `compile.ARCHS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from weft.kernels.tiles import Ready
from weft.kernels.triton import launch
from weft.kernels.triton.matmul import ACTIVATIONS, activate
from weft.kernels.triton.signals import Late, nanoseconds, wait_for


@triton.jit
def norm_kernel(
    x, bias, residual, weight, beta, total, out, mean, rstd, N, eps, stride_x, stride_residual,
    stride_total, stride_out, RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = norm(x + bias + residual) * weight + beta, a row a program.

    x, residual, total, out [M, N]   bias, weight, beta [N]   mean, rstd [M]; RMSNorm has no mean
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    z = tl.load(x + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
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


@triton.jit
def gather_kernel(
    out, first, first_index, second, second_index, third, third_index, N, stride_out, stride_first, stride_second,
    stride_third, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[r] = the sum of table[index[r]] over up to three tables; a negative index adds nothing.

    With one table this packs (index: the places of real tokens) and unpacks (index: the token of each place, or -1).
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    source = tl.load(first_index + row)
    some = tl.load(first + source * stride_first + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
    if second is not None:
        source = tl.load(second_index + row)
        more = tl.load(second + source * stride_second + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
        total = some.to(tl.float32) + more.to(tl.float32)
        if third is not None:
            source = tl.load(third_index + row)
            more = tl.load(third + source * stride_third + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
            total += more.to(tl.float32)
        some = total.to(out.dtype.element_ty)
    tl.store(out + row * stride_out + cols, some, mask=inside)


@triton.jit
def rotary_kernel(
    x, out, cos, sin, positions, half, sign, stride_x, stride_out, stride_head, BLOCK: tl.constexpr
):  # fmt: skip
    """Turns heads by their positions: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves of a head.

    x, out [T, H, D]   cos, sin [positions, D / 2] in float32   positions [T]
    """
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


@triton.jit
def gate_kernel(x, out, N, stride_x, stride_out, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    a = tl.load(x + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride_x + N + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + cols, (activate(a, ACTIVATION) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    parts, out, bias, ready, late, elements, ranks, stride_parts, N, ready_value, limit_ns,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out = parts[0] + parts[1] + ... + bias: the end of a reduce-scatter, in rank order, so no bit depends on timing.

    parts [P, elements], each written by another rank; out [elements]. A program may first wait for every rank's part.
    """
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
            total += tl.load(parts + tl.cast(rank, tl.int64) * stride_parts + at, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


MAX_TABLES = 3
MAX_WIDTH = 16_384  # a row is held in registers
_STRIP = dict(launch.STRIP.blocks)["BLOCK"]


def norm(
    x: Tensor, weight: Tensor | None, beta: Tensor | None, *, out: Tensor, eps: float, rms: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, total: Tensor | None = None,
    mean: Tensor | None = None, rstd: Tensor | None = None, isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """out = norm(x + bias + residual) * weight + beta over the last dim of x [M, N]; `total` takes the norm's input.

    This has never run on a GPU.
    """
    rows, width = out.shape
    launch.on_device(out, "out")
    dtype = launch.dtype_of(out, "out")
    if width > MAX_WIDTH:
        raise ValueError(f"rows of up to {MAX_WIDTH} elements are normed, got {width}; use torch's own norm")
    for t, name, shape in (
        (x, "x", (rows, width)),
        (weight, "weight", (width,)), (beta, "beta", (width,)), (bias, "bias", (width,)),
        (residual, "residual", (rows, width)), (total, "total", (rows, width)), (out, "out", (rows, width)),
    ):  # fmt: skip
        if t is not None:
            launch.like(t, name, shape, dtype, out.device)
    for t, name in ((mean, "mean"), (rstd, "rstd")):
        if t is not None and (t.numel() != rows or t.dtype != torch.float32 or not t.is_contiguous()):
            raise ValueError(f"{name} must be contiguous float32 of {rows} elements, got {t.dtype} {list(t.shape)}")
    if not rows or not width:
        return
    if rms and mean is not None:
        mean.zero_()
    norm_kernel[(rows,)](
        x, bias, residual, weight, beta, total, out, None if rms else mean, rstd, width, eps, x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if total is None else total.stride(0), out.stride(0), RMS=rms,
        **launch.rows(next_power_of_2(width)).launch,
    )  # fmt: skip


def gather(tables: Sequence[tuple[Tensor, Tensor]], *, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out[r] = the sum over (table, index) of table[index[r]]; a negative index adds nothing.

    Tables are [rows, N] of one type, indices int64 [M], out [M, N]. Indices past a table are not looked for: that
    would make the host wait for the device. This has never run on a GPU.
    """
    count, width = out.shape
    launch.on_device(out, "out")
    launch.like(out, "out", (count, width), launch.dtype_of(out, "out"), out.device)
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError(f"gather adds up 1 to {MAX_TABLES} tables, got {len(tables)}")
    for table, index in tables:
        launch.like(table, "table", (table.shape[0], width), out.dtype, out.device)
        launch.counters(index, "index", count, out.device, torch.int64)
    if not count or not width:
        return
    filled = [*tables, *[(None, None)] * (MAX_TABLES - len(tables))]
    gather_kernel[(count, cdiv(width, _STRIP))](
        out, *(t for pair in filled for t in pair), width, out.stride(0),
        *(0 if table is None else table.stride(0) for table, _ in filled), **launch.STRIP.launch,
    )  # fmt: skip


def sum_in_order(
    parts: Tensor, *, out: Tensor, bias: Tensor | None = None, ready: Ready | None = None, late: Late | None = None
) -> None:
    """out [m, n] = parts[0] + parts[1] + ... + bias, in this order, for parts [P, m, n], in float32 sums.

    `ready.counters` [P] says whose part is there (`ready.rows` has no meaning here). With `late`, a time-out sets its
    flag; without, it is raised here. This has never run on a GPU.
    """
    launch.on_device(parts, "parts")
    ranks, m, n = parts.shape
    launch.like(out, "out", (m, n), launch.dtype_of(parts, "parts"), parts.device)
    if not out.is_contiguous() or not parts.is_contiguous():
        raise ValueError(f"parts and out must be contiguous, got strides {parts.stride()} and {out.stride()}")
    if bias is not None:
        launch.like(bias, "bias", (n,), parts.dtype, parts.device)
    if ready is not None:
        launch.counters(ready.counters, "ready.counters", ranks, parts.device)
    mine = late or Late.on(parts.device)
    if m * n:
        config = launch.STRIP
        sum_kernel[(cdiv(m * n, _STRIP),)](
            parts, out, bias, None if ready is None else ready.counters, mine.flag, m * n, ranks, parts.stride(0), n,
            0 if ready is None else ready.value, 1 if ready is None else nanoseconds(ready.timeout),
            THREADS=32 * config.warps, INTERPRET=launch.INTERPRETED, **config.launch,
        )  # fmt: skip
    if ready is not None and late is None:
        mine.check(ready.what, seconds=ready.timeout)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, out: Tensor, heads: int, sign: float = 1.0,
    isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """Turns the first `heads` heads of x [T, H, D] into out [T, H, D]; cos and sin are float32 [positions, D / 2].

    Positions past the table are not looked for: that would make the host wait. This has never run on a GPU.
    """
    tokens, all_heads, width = x.shape
    launch.on_device(x, "x")
    if width % 2 or not 0 <= heads <= all_heads:
        raise ValueError(f"rotary needs an even head_dim and at most {all_heads} heads, got {width} and {heads}")
    for table, name in ((cos, "cos"), (sin, "sin")):
        launch.like(table.view(-1), name, (cos.shape[0] * (width // 2),), torch.float32, x.device)
    launch.counters(positions, "positions", tokens, x.device, torch.int64)
    for t, name in ((x, "x"), (out, "out")):
        launch.like(t, name, tuple(x.shape), launch.dtype_of(x, "x"), x.device)
        if tokens and t.stride()[1:] != (width, 1):
            raise ValueError(f"the heads of {name} must be contiguous, got strides {t.stride()}")
    if tokens and heads and width:
        rotary_kernel[(tokens, heads)](
            x, out, cos, sin, positions, width // 2, float(sign), x.stride(0), out.stride(0), width,
            **launch.rows(next_power_of_2(max(width // 2, 16))).launch,
        )  # fmt: skip


def gate(x: Tensor, *, activation: str, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]. This has never run on a GPU."""
    rows, width = out.shape
    launch.on_device(out, "out")
    launch.like(out, "out", (rows, width), launch.dtype_of(out, "out"), out.device)
    launch.like(x, "x", (rows, 2 * width), out.dtype, out.device)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    if rows and width:
        gate_kernel[(rows, cdiv(width, _STRIP))](
            x, out, width, x.stride(0), out.stride(0), ACTIVATION=activation, **launch.STRIP.launch
        )  # fmt: skip
