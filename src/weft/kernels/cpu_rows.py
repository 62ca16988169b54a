"""The native row operations on torch tensors: norms, sums of table rows, rotary positions, gates.

Like `weft.kernels.cpu`, this is where shapes are checked: the core never checks again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft import _core
from weft.kernels.cpu import ACTIVATIONS, dtype_code, isa, thread_count

MAX_TABLES = 3
_NOWHERE = (0, 0)


def norm(
    x: Tensor, weight: Tensor | None, beta: Tensor | None, *, out: Tensor, eps: float, rms: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, total: Tensor | None = None,
    mean: Tensor | None = None, rstd: Tensor | None = None, isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """out = norm(x + bias + residual) * weight + beta over the last dim of x [M, N]; `total` takes the norm's input."""
    rows, width = x.shape
    for vector, name in ((weight, "weight"), (beta, "beta"), (bias, "bias")):
        if vector is not None:
            _check(vector, name, (width,), x.dtype)
    for matrix, name in ((residual, "residual"), (total, "total"), (out, "out")):
        if matrix is not None:
            _check(matrix, name, (rows, width), x.dtype)
    _core.norm(
        isa(isa_name), dtype_code(x.dtype), rms, _rows(x, "x"), _at(bias),
        _NOWHERE if residual is None else _rows(residual, "residual"), _at(weight), _at(beta), eps,
        _NOWHERE if total is None else _rows(total, "total"), _rows(out, "out"), _at(mean), _at(rstd),
        rows, width, thread_count(threads),
    )  # fmt: skip


def gather(tables: Sequence[tuple[Tensor, Tensor]], *, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out[r] = the sum over (table, index) of table[index[r]]; a negative index adds nothing.

    Tables are [rows, N] of one type, indices int64 [M], out [M, N]. An index past its table is an error.
    """
    count, width = out.shape
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError(f"gather adds up 1 to {MAX_TABLES} tables, got {len(tables)}")
    native = []
    for table, index in tables:
        _check(table, "table", (table.shape[0], width), out.dtype)
        _check(index, "index", (count,), torch.int64)
        if count and int(index.max()) >= table.shape[0]:
            raise ValueError(f"a table of {table.shape[0]} rows was asked for row {int(index.max())}")
        native.append((*_rows(table, "table"), index.data_ptr()))
    _core.gather(
        isa(isa_name), dtype_code(out.dtype), native, _rows(out, "out"), count, width, thread_count(threads)
    )  # fmt: skip


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, out: Tensor, heads: int, sign: float = 1.0,
    isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """Turns the first `heads` heads of x [T, H, D] into out [T, H, D]; cos and sin are [positions, D / 2]."""
    tokens, all_heads, width = x.shape
    if width % 2 or not 0 <= heads <= all_heads:
        raise ValueError(f"rotary needs an even head_dim and at most {all_heads} heads, got {width} and {heads}")
    for table, name in ((cos, "cos"), (sin, "sin")):
        _check(table, name, (cos.shape[0], width // 2), torch.float32)
    _check(positions, "positions", (tokens,), torch.int64)
    if tokens and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise ValueError(
            f"positions must be from 0 to {cos.shape[0] - 1}, got {int(positions.min())} to {int(positions.max())}"
        )
    for t, name in ((x, "x"), (out, "out")):
        if t.shape != x.shape or t.dtype != x.dtype or (tokens and t.stride()[1:] != (width, 1)):
            raise ValueError(f"the heads of {name} must be contiguous and alike, got {list(t.shape)} {t.stride()}")
    _core.rotary(
        isa(isa_name), dtype_code(x.dtype), (x.data_ptr(), x.stride(0)), (out.data_ptr(), out.stride(0)), heads, width,
        cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), sign, tokens, thread_count(threads),
    )  # fmt: skip


def gate(x: Tensor, *, activation: str, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]."""
    rows, width = out.shape
    _check(x, "x", (rows, 2 * width), out.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    _core.gate(
        isa(isa_name), dtype_code(x.dtype), _rows(x, "x"), _rows(out, "out"), ACTIVATIONS[activation], rows, width,
        thread_count(threads),
    )  # fmt: skip


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _rows(t: Tensor, name: str) -> tuple[int, int]:
    if t.stride(1) != 1 and t.shape[1] > 1:
        raise ValueError(f"the rows of {name} must be contiguous, got strides {t.stride()}; call .contiguous()")
    return t.data_ptr(), t.stride(0)


def _check(t: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if t.shape != shape or t.dtype != dtype or not t.is_cpu:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)} on the CPU, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    if t.dim() == 1 and not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; call .contiguous()")
