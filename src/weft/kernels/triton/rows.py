"""The launchers of the row operations: the arguments of `weft.kernels.cpu_rows`, on the device.

None of these has ever run on a GPU: they were run in Triton's interpreter and compiled for sm80, sm90 and sm100.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from weft.kernels.tiles import Ready
from weft.kernels.triton import checks, configs
from weft.kernels.triton.activations import ACTIVATIONS
from weft.kernels.triton.gate import gate_kernel
from weft.kernels.triton.gather import gather_kernel
from weft.kernels.triton.late import Late, nanoseconds
from weft.kernels.triton.norm import norm_kernel
from weft.kernels.triton.order import Order
from weft.kernels.triton.rotary import rotary_kernel
from weft.kernels.triton.sums import sum_kernel

MAX_TABLES = 3
MAX_WIDTH = 16_384  # a row is held in registers
_STRIP = dict(configs.STRIP.blocks)["BLOCK"]


def norm(
    x: Tensor, weight: Tensor | None, beta: Tensor | None, *, out: Tensor, eps: float, rms: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, total: Tensor | None = None,
    mean: Tensor | None = None, rstd: Tensor | None = None, order: Order | None = None,
    isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """out = norm(x + bias + residual) * weight + beta over the last dim of x [M, N]; `total` takes the norm's input.

    With `order`, x is the flat buffer that the order describes, and rows are put together again as they are read.
    This has never run on a GPU.
    """
    rows, width = out.shape
    checks.on_device(out, "out")
    dtype = checks.dtype_of(out, "out")
    if width > MAX_WIDTH:
        raise ValueError(f"rows of up to {MAX_WIDTH} elements are normed, got {width}; use torch's own norm")
    _check_source(x, order, rows, width, dtype, out.device)
    for t, name, shape in (
        (weight, "weight", (width,)), (beta, "beta", (width,)), (bias, "bias", (width,)),
        (residual, "residual", (rows, width)), (total, "total", (rows, width)), (out, "out", (rows, width)),
    ):  # fmt: skip
        if t is not None:
            checks.like(t, name, shape, dtype, out.device)
    for t, name in ((mean, "mean"), (rstd, "rstd")):
        if t is not None and (t.numel() != rows or t.dtype != torch.float32 or not t.is_contiguous()):
            raise ValueError(f"{name} must be contiguous float32 of {rows} elements, got {t.dtype} {list(t.shape)}")
    if not rows or not width:
        return
    if rms and mean is not None:
        mean.zero_()
    pieces = (1, 1, 1) if order is None else (order.rows, order.cols, order.starts.shape[1])
    norm_kernel[(rows,)](
        x, None if order is None else order.starts, None if order is None else order.strides, bias, residual, weight,
        beta, total, out, None if rms else mean, rstd, width, eps, x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if total is None else total.stride(0), out.stride(0), *pieces, RMS=rms,
        **configs.rows(next_power_of_2(width)).launch,
    )  # fmt: skip


def _check_source(
    x: Tensor, order: Order | None, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:  # fmt: skip
    if order is None:
        return checks.like(x, "x", (rows, width), dtype, device)
    if (order.m, order.n) != (rows, width) or order.starts.device != device:
        raise ValueError(
            f"the order must be of [{rows}, {width}] on {device}, got [{order.m}, {order.n}] on {order.starts.device}"
        )
    if x.dim() != 1 or not x.is_contiguous() or x.dtype != dtype or x.device != device or x.numel() < order.elements:
        raise ValueError(
            f"with an order, x is a flat {dtype} buffer of at least {order.elements} elements on {device}, "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )


def gather(tables: Sequence[tuple[Tensor, Tensor]], *, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out[r] = the sum over (table, index) of table[index[r]]; a negative index adds nothing.

    Tables are [rows, N] of one type, indices int64 [M], out [M, N]. Indices past a table are not looked for: that
    would make the host wait for the device. This has never run on a GPU.
    """
    count, width = out.shape
    checks.on_device(out, "out")
    checks.like(out, "out", (count, width), checks.dtype_of(out, "out"), out.device)
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError(f"gather adds up 1 to {MAX_TABLES} tables, got {len(tables)}")
    for table, index in tables:
        checks.like(table, "table", (table.shape[0], width), out.dtype, out.device)
        checks.counters(index, "index", count, out.device, torch.int64)
    if not count or not width:
        return
    filled = [*tables, *[(None, None)] * (MAX_TABLES - len(tables))]
    gather_kernel[(count, cdiv(width, _STRIP))](
        out, *(t for pair in filled for t in pair), width, out.stride(0),
        *(0 if table is None else table.stride(0) for table, _ in filled), **configs.STRIP.launch,
    )  # fmt: skip


def sum_in_order(
    parts: Tensor, *, out: Tensor, bias: Tensor | None = None, ready: Ready | None = None, late: Late | None = None
) -> None:
    """out [m, n] = parts[0] + parts[1] + ... + bias, in this order, for parts [P, m, n], in float32 sums.

    `ready.counters` [P] says whose part is there (`ready.rows` has no meaning here). With `late`, a time-out sets its
    flag; without, it is raised here. This has never run on a GPU.
    """
    checks.on_device(parts, "parts")
    ranks, m, n = parts.shape
    checks.like(out, "out", (m, n), checks.dtype_of(parts, "parts"), parts.device)
    if not out.is_contiguous() or not parts.is_contiguous():
        raise ValueError(f"parts and out must be contiguous, got strides {parts.stride()} and {out.stride()}")
    if bias is not None:
        checks.like(bias, "bias", (n,), parts.dtype, parts.device)
    if ready is not None:
        checks.counters(ready.counters, "ready.counters", ranks, parts.device)
    mine = late or Late.on(parts.device)
    if m * n:
        config = configs.STRIP
        sum_kernel[(cdiv(m * n, _STRIP),)](
            parts, out, bias, None if ready is None else ready.counters, mine.flag, m * n, ranks, parts.stride(0), n,
            0 if ready is None else ready.value, 1 if ready is None else nanoseconds(ready.timeout),
            THREADS=32 * config.warps, INTERPRET=checks.INTERPRETED, **config.launch,
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
    checks.on_device(x, "x")
    if width % 2 or not 0 <= heads <= all_heads:
        raise ValueError(f"rotary needs an even head_dim and at most {all_heads} heads, got {width} and {heads}")
    for table, name in ((cos, "cos"), (sin, "sin")):
        checks.like(table.view(-1), name, (cos.shape[0] * (width // 2),), torch.float32, x.device)
    checks.counters(positions, "positions", tokens, x.device, torch.int64)
    for t, name in ((x, "x"), (out, "out")):
        checks.like(t, name, tuple(x.shape), checks.dtype_of(x, "x"), x.device)
        if tokens and t.stride()[1:] != (width, 1):
            raise ValueError(f"the heads of {name} must be contiguous, got strides {t.stride()}")
    if tokens and heads and width:
        rotary_kernel[(tokens, heads)](
            x, out, cos, sin, positions, width // 2, float(sign), x.stride(0), out.stride(0), width,
            **configs.rows(next_power_of_2(max(width // 2, 16))).launch,
        )  # fmt: skip


def gate(x: Tensor, *, activation: str, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]. This has never run on a GPU."""
    rows, width = out.shape
    checks.on_device(out, "out")
    checks.like(out, "out", (rows, width), checks.dtype_of(out, "out"), out.device)
    checks.like(x, "x", (rows, 2 * width), out.dtype, out.device)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    if rows and width:
        gate_kernel[(rows, cdiv(width, _STRIP))](
            x, out, width, x.stride(0), out.stride(0), ACTIVATION=activation, **configs.STRIP.launch
        )  # fmt: skip
