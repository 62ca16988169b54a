"""Overlapped matmuls under `torch.autocast`: as torch's own linear, they compute in the type that it names.

x, weight and bias are cast to that type (float64 is not), the result has it, and gradients go back through the casts.
Inside the op autocast is off, in the backward pass too: types have been chosen by then.

How many flops the custom ops are, for torch's `FlopCounterMode`: those of this rank's matmul, without sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft._torch import tell_flop_counters
from weft.kernels import PackedWeight

F = TypeVar("F", bound=Callable[..., Any])


def cast_inputs(op: F) -> F:
    """`op(x, w, ..., bias=)` with its inputs in the type of autocast, where that is on."""
    names = list(signature(op).parameters)
    x, w = names[:2]

    @wraps(op)
    def call(*tensors: Any, **options: Any) -> Any:
        device = (tensors[0] if tensors else options[x]).device.type
        if not torch.is_autocast_enabled(device):
            return op(*tensors, **options)
        given = dict(zip(names, tensors, strict=False)) | options
        dtype = torch.get_autocast_dtype(device)
        given[x], given[w] = _cast(given[x], dtype), _cast_weight(given[w], dtype)
        if given.get("bias") is not None:
            given["bias"] = _cast(given["bias"], dtype)
        with torch.autocast(device, enabled=False):
            return op(**given)

    return call  # type: ignore[return-value]


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def _cast_weight(w: Tensor | PackedWeight, dtype: torch.dtype) -> Tensor | PackedWeight:
    """A packed weight of another type is packed again in this one: of the dense one beside it, where there is one."""
    if isinstance(w, Tensor):
        return _cast(w, dtype)
    if w.data.dtype == dtype:
        return w
    return _cast(w.to_dense() if w.source is None else w.source, dtype)


def without_autocast(kernel: F) -> F:
    """The body of an op whose types have been chosen: torch's ops in it compute in the types of their inputs."""

    @wraps(kernel)
    def run(first: Tensor, *rest: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled(first.device.type):
            return kernel(first, *rest, **options)
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *rest, **options)

    return run  # type: ignore[return-value]


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


_FORMULAS: dict[str, Callable[..., int]] = {
    "all_gather_matmul": _gathered,
    "all_gather_matmul_backward": _columns,
    "matmul_reduce": _whole,
    "matmul_reduce_scatter_backward": _rows,
    "matmul_all_reduce_backward": _columns,
    "matmul_all_to_all": _to_all,
    "matmul_all_to_all_backward": _back,
    "replicated_matmul": _replicated,
    "replicated_matmul_backward": _columns,
}


def tell_counters() -> None:
    """Gives the formulas to every `FlopCounterMode` that is active: it knows the ops of torch only."""
    tell_flop_counters({getattr(torch.ops.weft, name): formula for name, formula in _FORMULAS.items()})
