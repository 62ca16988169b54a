"""A column-parallel matmul whose input all ranks hold: nothing to gather, but its gradient is a sum over ranks.

replicated_matmul   x [M, K] the same on all ranks, w_r [N_r, K], b_r [N_r]   -> y_r [M, N_r]
    forward   y_r = x w_r^T + b_r
    dgrad     dx = all_reduce(dy_r w_r)                              a matmul_all_reduce
    wgrad     dw_r = dy_r^T x,  db_r = sum of rows of dy_r           while dx travels
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.kernels import PackedWeight
from weft.overlap import calls
from weft.overlap.autocast import cast_inputs, without_autocast
from weft.overlap.context import context_by_name
from weft.overlap.once import refuse_second_order
from weft.overlap.ops import column_gradients, packed_weight
from weft.overlap.plan import Op


@cast_inputs
def replicated_matmul(
    x: Tensor, w: Tensor | PackedWeight, *, group: ProcessGroup, bias: Tensor | None = None
) -> Tensor:
    """y_r = x w_r^T + bias_r: x [M, K], w_r [N_r, K], bias_r [N_r] -> [M, N_r]."""
    weight, packed, isa = (w.checked_source(), w.data, w.isa) if isinstance(w, PackedWeight) else (w, None, "")
    n = w.n if isinstance(w, PackedWeight) else w.shape[0]
    y: Tensor = replicated(x, weight, packed, bias, n, isa, group.group_name)
    return y


@torch.library.custom_op("weft::replicated_matmul", mutates_args=())
@without_autocast
def replicated(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None, n: int, isa: str, group_name: str
) -> Tensor:
    return calls.alone(x, packed_weight(context_by_name(group_name), w, packed, n, x.shape[1], isa), bias)


@replicated.register_fake
def _(x, w, packed, bias, n, isa, group_name):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n)


@torch.library.custom_op("weft::replicated_matmul_backward", mutates_args=())
@without_autocast
def replicated_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return column_gradients(Op.ALL_REDUCE, dy, x, w, packed, isa, group_name, needs_x, needs_w)


@replicated_backward.register_fake
def _(dy, x, w, packed, isa, group_name, needs_x, needs_w):  # type: ignore[no-untyped-def]
    k = x.shape[1]
    return dy.new_empty(x.shape[0] if needs_x else 0, k), dy.new_empty(dy.shape[1] if needs_w else 0, k)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, packed, _, _, ctx.isa, ctx.group_name = inputs
    ctx.save_for_backward(x, w, packed)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, w, packed = ctx.saved_tensors
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        dx, dw = replicated_backward(dy, x, w, packed, ctx.isa, ctx.group_name, needs_x, needs_w)
    db = dy.sum(0) if needs_bias else None
    return dx if needs_x else None, dw if needs_w else None, None, db, None, None, None


replicated.register_autograd(_backward, setup_context=_setup)
refuse_second_order(replicated_backward)
