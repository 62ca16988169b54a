"""What a call of an overlapped op was given: cast where autocast says so, and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.kernels import PackedWeight
from weft.kernels.dispatch import check_tensor, dtypes_on, is_supported
from weft.kernels.norm import LayerNorm, RMSNorm
from weft.overlap.blocks import chunk_bounds

Weight = Tensor | PackedWeight
F = TypeVar("F", bound=Callable[..., Any])


def cast_inputs(op: F) -> F:
    """`op(x, w, ..., bias=)` with its inputs in the type of autocast, where that is on."""
    names = list(signature(op).parameters)
    x, w = names[:2]

    @wraps(op)
    def call(*tensors: Any, **options: Any) -> Any:
        first = tensors[0] if tensors else options.get(x)
        if not isinstance(first, Tensor) or first.is_meta:  # which the op refuses, and torch knows no autocast for
            return op(*tensors, **options)
        device = first.device.type
        if not torch.is_autocast_enabled(device):
            return op(*tensors, **options)
        given = dict(zip(names, tensors, strict=False)) | options
        dtype = torch.get_autocast_dtype(device)
        given[x], given[w] = _cast(given[x], dtype), _cast_weight(given[w], dtype)
        if "bias" in given:
            given["bias"] = _cast(given["bias"], dtype)
        with torch.autocast(device, enabled=False):
            return op(**given)

    return call  # type: ignore[return-value]


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """What is no tensor is left for the op to refuse."""
    return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t


def _cast_weight(w: Any, dtype: torch.dtype) -> Any:
    """A packed weight of another type is packed again in this one: of the dense one beside it, where there is one."""
    if not isinstance(w, PackedWeight):
        return _cast(w, dtype)
    if w.data.dtype == dtype:
        return w
    return _cast(w.to_dense() if w.source is None else w.source, dtype)


def checked(
    name: str, x: Tensor, w_name: str, w: Weight, bias: Tensor | None, group: object
) -> tuple[Tensor | None, Tensor | None, int, str]:
    """The weight as ops take it: dense where there is one, packed where the caller did that, N, instruction set."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}, expected a process group that this rank is in, such as "
            "torch.distributed.group.WORLD or mesh.get_group()"
        )
    check_tensor(name, x)
    if isinstance(w, PackedWeight):
        check_tensor(f"{w_name}.data", w.data, x.device)
        dense, packed, n, k, isa, dtype = w.checked_source(), w.data, w.n, w.k, w.isa, w.dtype
    else:
        check_tensor(w_name, w, x.device)
        if w.dim() != 2:
            raise ValueError(f"a weight has shape [N, K], got {list(w.shape)}")
        dense, packed, (n, k), isa, dtype = w, None, w.shape, "", w.dtype
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected [M, {k}] for a weight [{n}, {k}]; flatten it")
    if x.dtype != dtype or not is_supported(x.device.type, x.dtype):
        types = dtypes_on(x.device.type) or f"a device with kernels, not {x.device.type}"
        raise ValueError(f"{name} is {x.dtype} and the weight {dtype}, expected {types}, both alike")
    if bias is not None:
        check_tensor("bias", bias, x.device)
        if bias.shape != (n,) or bias.dtype != x.dtype:
            expected = f"{x.dtype} [{n}] like the weight's rows"
            raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, expected {expected}")
    return dense, packed, n, isa


def check_shard(rows: int, total: int, group: ProcessGroup) -> None:
    """Raises unless a shard of x has as many rows as torch.chunk gives this rank of `total`."""
    bounds, size, rank = chunk_bounds(total, group.size()), group.size(), group.rank()
    expected = bounds[rank + 1] - bounds[rank]
    if rows != expected:
        raise ValueError(
            f"x_shard has {rows} rows, expected {expected}: rank {rank}'s part of m={total} rows after torch.chunk "
            f"over {size} ranks; give m=, the number of all rows"
        )


def check_norm(norm: object, residual: Tensor | None, x: Tensor, n: int, rows: int) -> None:
    """Raises unless `norm` is one of rows of n, and `residual` is added to as many rows as there will be."""
    if not isinstance(norm, RMSNorm | LayerNorm):
        what = "residual= is added where norm= is taken" if norm is None else f"norm is a {type(norm).__name__}"
        raise ValueError(
            f"{what}, expected norm=weft.RMSNorm(...) or weft.LayerNorm(...); without one, add it yourself"
        )
    for name, t, shape in (
        ("norm.weight", norm.weight, (n,)), ("norm.bias", norm.beta, (n,)), ("residual", residual, (rows, n))
    ):  # fmt: skip
        if t is not None:
            check_tensor(name, t, x.device)
            if tuple(t.shape) != shape or t.dtype != x.dtype:
                raise ValueError(f"{name} is {t.dtype} {list(t.shape)}, expected {x.dtype} {list(shape)}")
