"""How many flops the custom ops are, for torch's `FlopCounterMode`: those of this rank's matmul, without sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft._torch import tell_flop_counters
from weft.overlap import ops, ops_all_to_all, ops_replicated


def _matmul(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def _gathered(x: Tensor, w: Any, packed: Any, bias: Any, m: int, n: int, *_: Any, **__: Any) -> int:
    return _matmul(m, n, x.shape[1])


def _whole(x: Tensor, w: Any, packed: Any, bias: Any, op: str, n: int, *_: Any, **__: Any) -> int:
    return _matmul(x.shape[0], n, x.shape[1])


def _to_all(x: Tensor, w: Any, packed: Any, bias: Any, to: Any, rows: int, n: int, *_: Any, **__: Any) -> int:
    return _matmul(x.shape[0], n, x.shape[1])


def _replicated(x: Tensor, w: Any, packed: Any, bias: Any, n: int, *_: Any, **__: Any) -> int:
    return _matmul(x.shape[0], n, x.shape[1])


def _columns(dy: Tensor, x: Tensor, *rest: Any, **__: Any) -> int:
    """dx = dy w and dw = dy^T x, of those that are wanted."""
    return (bool(rest[-2]) + bool(rest[-1])) * _matmul(dy.shape[0], dy.shape[1], x.shape[1])


def _rows(dy: Tensor, x: Tensor, *rest: Any, **__: Any) -> int:
    """dx = DY w, and dw = DY^T x if it is wanted, for DY [M, N]."""
    return (1 + bool(rest[-1])) * _matmul(x.shape[0], dy.shape[1], x.shape[1])


def _back(dy: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _matmul(x.shape[0], dy.shape[1], x.shape[1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    ops.all_gather_matmul: _gathered,
    ops.all_gather_matmul_backward: _columns,
    ops.matmul_reduce: _whole,
    ops.matmul_reduce_scatter_backward: _rows,
    ops.matmul_all_reduce_backward: _columns,
    ops_all_to_all.matmul_all_to_all: _to_all,
    ops_all_to_all.matmul_all_to_all_backward: _back,
    ops_replicated.replicated: _replicated,
    ops_replicated.replicated_backward: _columns,
}


def tell_counters() -> None:
    """Gives the formulas to every `FlopCounterMode` that is active: it knows the ops of torch only."""
    tell_flop_counters({op._opoverload.overloadpacket: formula for op, formula in _FORMULAS.items()})
