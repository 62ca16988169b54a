"""Overlapped matmuls under `torch.autocast`: as torch's own linear, they compute in the type that it names.

x, weight and bias are cast to that type (float64 is not), the result has it, and gradients go back through the casts.
Inside the op autocast is off, in the backward pass too: types have been chosen by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

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
