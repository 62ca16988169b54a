"""Who runs an overlapped matmul: the table of kernels says who computes, and whoever computes has one executor."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

from torch import Tensor

from weft.kernels import PackedWeight
from weft.kernels.dispatch import NATIVE, TRITON, kernels_for
from weft.overlap.context import Context
from weft.overlap.plan import Op

_MODULES = {NATIVE: "weft.overlap.calls", TRITON: "weft.overlap.streams"}


class Executor(Protocol):
    """One function for each kind of call, on plain tensors and without gradients; see `calls.py`."""

    def gather_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
    ) -> tuple[Tensor, Tensor]: ...

    def matmul_scatter(
        self,
        context: Context,
        op: Op,
        x: Tensor,
        weight: PackedWeight,
        *,
        bias: Tensor | None,
        plan: str = "",
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor: ...

    def matmul_scatter_rows(
        self, context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
    ) -> tuple[Tensor, Tensor]: ...

    def gather_rows_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, counts: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def executor_for(tensor: Tensor) -> Executor:
    """The executor for the device and type of `tensor`."""
    return _load(kernels_for(tensor).name)


@cache
def _load(name: str) -> Executor:
    return cast("Executor", importlib.import_module(_MODULES[name]))
