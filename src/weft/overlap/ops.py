"""Ops whose gradients have no gradients: better an error that says so than a silent part of the truth.

The custom ops: what torch's dispatcher, autograd and compiler see. `functional.py` is what users call.

Those of all-to-all are in `ops_all_to_all.py`, that of a replicated input in `ops_replicated.py`.

A group travels by its name, as in torch's functional collectives. A weight is `w`, dense, or `packed`, with the dense
one beside it when a gradient is wanted. Each backward is an op of its own, so that it overlaps when compiled too. The
`run_` functions are the same without torch's dispatcher, which has nothing to add where no gradient is wanted.

The custom ops of `matmul_all_to_all`; see `ops.py`.

A column-parallel matmul whose input all ranks hold: nothing to gather, but its gradient is a sum over ranks.

replicated_matmul   x [M, K] the same on all ranks, w_r [N_r, K], b_r [N_r]   -> y_r [M, N_r]
    forward   y_r = x w_r^T + b_r
    dgrad     dx = all_reduce(dy_r w_r)                              a matmul_all_reduce
    wgrad     dw_r = dy_r^T x,  db_r = sum of rows of dy_r           while dx travels
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import group_by_name, op_name
from weft.kernels import PackedWeight
from weft.kernels.matmul import product
from weft.overlap.blocks import chunk_bounds
from weft.overlap.executor import calls
from weft.overlap.executor.calls import executor_for
from weft.overlap.executor.context import Context, context_by_name
from weft.overlap.executor.resources import pack
from weft.overlap.plan import Op
from weft.overlap.torch_modes import cast_inputs, without_autocast


def refuse_second_order(op: Any) -> None:
    """Makes a backward op say what is missing when someone asks for the gradient of a gradient."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"gradients of gradients through {op_name(op)} are not defined; leave out create_graph=True, or keep the "
            "overlapped op out of what is differentiated twice"
        )

    op.register_autograd(refuse)


def packed_weight(context: Context, w: Tensor | None, packed: Tensor | None, n: int, k: int, isa: str) -> PackedWeight:
    if packed is not None:
        return PackedWeight(packed, n, k, isa)
    assert w is not None
    return context.weights.packed(w)


def transposed_weight(
    context: Context, w: Tensor | None, packed: Tensor | None, n: int, k: int, isa: str
) -> PackedWeight:
    """The transposed weight [K, N], which input gradients are multiplied with.

    Whoever packs by hand may have reasons to: then nothing is kept here either.
    """
    if packed is None:
        assert w is not None
        return context.weights.packed(w, transposed=True)
    return pack((PackedWeight(packed, n, k, isa).to_dense() if w is None else w.detach()).t())


def column_gradients(
    op: Op, dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of a column-parallel matmul: dx = op(dy w), and dw = dy^T x, made while dx travels; empty where not needed."""
    context = context_by_name(group_name)
    n, k = dy.shape[1], x.shape[1]
    dw: list[Tensor] = []

    def weight_gradient() -> None:
        if needs_w:
            dw.append(product(dy.t(), x.t()))

    if not needs_x:
        weight_gradient()
        dx = dy.new_empty(0, k)
    elif context.size == 1:
        dx = calls.alone(dy, transposed_weight(context, w, packed, n, k, isa), None)
        weight_gradient()
    else:
        weight = transposed_weight(context, w, packed, n, k, isa)
        dx = executor_for(dy).matmul_scatter(context, op, dy, weight, bias=None, meanwhile=weight_gradient)
    return dx, dw[0] if dw else dy.new_empty(0, k)


def _shard_rows(m: int, group_name: str) -> int:
    """The rows of this rank, also while compiling, where there is no context."""
    pg = group_by_name(group_name)
    bounds = chunk_bounds(m, pg.size())
    return bounds[pg.rank() + 1] - bounds[pg.rank()]


# all_gather_matmul ------------------------------------------------------------------------------------------


@without_autocast
def run_all_gather_matmul(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None,
    m: int, n: int, isa: str, group_name: str, plan: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = context_by_name(group_name)
    weight = packed_weight(context, w, packed, n, x.shape[1], isa)
    if context.size == 1:
        return calls.alone(x, weight, bias), x.clone() if keep else x.new_empty(0, x.shape[1])
    return executor_for(x).gather_matmul(context, x, weight, m=m, bias=bias, plan=plan, keep=keep)


all_gather_matmul = torch.library.custom_op("weft::all_gather_matmul", run_all_gather_matmul, mutates_args=())


@all_gather_matmul.register_fake
def _(x, w, packed, bias, m, n, isa, group_name, plan, keep):  # type: ignore[no-untyped-def]
    return x.new_empty(m, n), x.new_empty(m if keep else 0, x.shape[1])


@torch.library.custom_op("weft::all_gather_matmul_backward", mutates_args=())
@without_autocast
def all_gather_matmul_backward(
    dy: Tensor, gathered: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx_shard = reduce_scatter(dy w), dw = dy^T x, which is computed while the last of dx travels."""
    return column_gradients(Op.REDUCE_SCATTER, dy, gathered, w, packed, isa, group_name, needs_x, needs_w)


@all_gather_matmul_backward.register_fake
def _(dy, gathered, w, packed, isa, group_name, needs_x, needs_w):  # type: ignore[no-untyped-def]
    k = gathered.shape[1]
    rows = _shard_rows(dy.shape[0], group_name) if needs_x else 0
    return dy.new_empty(rows, k), dy.new_empty(dy.shape[1] if needs_w else 0, k)


def _gather_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, w, packed, _, _, _, ctx.isa, ctx.group_name, _, _ = inputs
    ctx.save_for_backward(output[1], w, packed)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _gather_backward(ctx, dy: Tensor | None, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 10
    gathered, w, packed = ctx.saved_tensors
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        dx, dw = all_gather_matmul_backward(dy, gathered, w, packed, ctx.isa, ctx.group_name, needs_x, needs_w)
    db = dy.sum(0) if needs_bias else None
    return dx if needs_x else None, dw if needs_w else None, None, db, *(None,) * 6


all_gather_matmul.register_autograd(_gather_backward, setup_context=_gather_setup)


# matmul_reduce_scatter, matmul_all_reduce -------------------------------------------------------------------


@without_autocast
def run_matmul_reduce(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None,
    op: str, n: int, isa: str, group_name: str, plan: str,
) -> Tensor:  # fmt: skip
    context = context_by_name(group_name)
    weight = packed_weight(context, w, packed, n, x.shape[1], isa)
    if context.size == 1:
        return calls.alone(x, weight, bias)
    return executor_for(x).matmul_scatter(context, Op(op), x, weight, bias=bias, plan=plan)


matmul_reduce = torch.library.custom_op("weft::matmul_reduce", run_matmul_reduce, mutates_args=())


@matmul_reduce.register_fake
def _(x, w, packed, bias, op, n, isa, group_name, plan):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0] if op == Op.ALL_REDUCE.value else _shard_rows(x.shape[0], group_name), n)


@torch.library.custom_op("weft::matmul_reduce_scatter_backward", mutates_args=())
@without_autocast
def matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, isa: str, group_name: str, needs_w: bool
) -> tuple[Tensor, Tensor]:
    """dx = all_gather(dy_shard) w, dw = all_gather(dy_shard)^T x."""
    context = context_by_name(group_name)
    m, k, n = x.shape[0], x.shape[1], dy.shape[1]
    weight = transposed_weight(context, w, packed, n, k, isa)
    if context.size == 1:
        dx, gathered = calls.alone(dy, weight, None), dy
    else:
        dx, gathered = executor_for(dy).gather_matmul(context, dy, weight, m=m, bias=None, plan="", keep=needs_w)
    return dx, product(gathered.t(), x.t()) if needs_w else dy.new_empty(0, k)


@matmul_reduce_scatter_backward.register_fake
def _(dy, x, w, packed, isa, group_name, needs_w):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), dy.new_empty(dy.shape[1] if needs_w else 0, x.shape[1])


@torch.library.custom_op("weft::matmul_all_reduce_backward", mutates_args=())
@without_autocast
def matmul_all_reduce_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, isa: str, needs_x: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    """dx = dy w, dw = dy^T x: dy is the same on all ranks, so there is nothing to communicate."""
    k = x.shape[1]
    dx, dw = dy.new_empty(0, k), dy.new_empty(0, k)
    if needs_x:
        dense = PackedWeight(_given(packed), dy.shape[1], k, isa).to_dense() if w is None else w.detach()
        dx = product(dy, dense.t())
    if needs_w:
        dw = product(dy.t(), x.t())
    return dx, dw


def _given(packed: Tensor | None) -> Tensor:
    assert packed is not None
    return packed


@matmul_all_reduce_backward.register_fake
def _(dy, x, w, packed, isa, needs_x, needs_w):  # type: ignore[no-untyped-def]
    k = x.shape[1]
    return dy.new_empty(x.shape[0] if needs_x else 0, k), dy.new_empty(dy.shape[1] if needs_w else 0, k)


def _reduce_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, packed, _, ctx.op, _, ctx.isa, ctx.group_name, _ = inputs
    ctx.save_for_backward(x, w, packed)


def _reduce_backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, w, packed = ctx.saved_tensors
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        if ctx.op == Op.ALL_REDUCE.value:
            dx, dw = matmul_all_reduce_backward(dy, x, w, packed, ctx.isa, needs_x, needs_w)
        else:
            dx, dw = matmul_reduce_scatter_backward(dy, x, w, packed, ctx.isa, ctx.group_name, needs_w)
    db = dy.sum(0) if needs_bias else None
    return dx if needs_x else None, dw if needs_w else None, None, db, *(None,) * 5


matmul_reduce.register_autograd(_reduce_backward, setup_context=_reduce_setup)

for _op in (all_gather_matmul_backward, matmul_reduce_scatter_backward, matmul_all_reduce_backward):
    refuse_second_order(_op)


@without_autocast
def run_matmul_all_to_all(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None, destinations: Tensor,
    rows: int, n: int, isa: str, group_name: str, plan: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = context_by_name(group_name)
    weight = packed_weight(context, w, packed, n, x.shape[1], isa)
    if context.size == 1:
        return calls.alone(x, weight, bias), torch.tensor([[x.shape[0]]])
    executor = executor_for(x)
    y, counts = executor.matmul_scatter_rows(context, x, weight, destinations, bias=bias, plan=plan)
    if rows >= 0 and y.shape[0] != rows:
        raise ValueError(f"rows={rows} rows were promised to rank {context.rank}, but {y.shape[0]} came")
    return y, counts


matmul_all_to_all = torch.library.custom_op("weft::matmul_all_to_all", run_matmul_all_to_all, mutates_args=())


@matmul_all_to_all.register_fake
def _(x, w, packed, bias, destinations, rows, n, isa, group_name, plan):  # type: ignore[no-untyped-def]
    size = group_by_name(group_name).size()
    if rows < 0:
        rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(rows, n), torch.empty(size, size, dtype=torch.int64)


@torch.library.custom_op("weft::matmul_all_to_all_backward", mutates_args=())
@without_autocast
def matmul_all_to_all_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, destinations: Tensor, counts: Tensor,
    isa: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dz = the rows of dy, back on the ranks that they came from; dx = dz w, dw = dz^T x, db = sum of dz."""
    context = context_by_name(group_name)
    weight = transposed_weight(context, w, packed, dy.shape[1], x.shape[1], isa)
    if context.size == 1:
        return calls.alone(dy, weight, None), product(dy.t(), x.t()), dy.sum(0)
    sorted_dx, dz = executor_for(dy).gather_rows_matmul(context, dy, weight, counts)
    order = torch.argsort(destinations, stable=True)
    dx = torch.empty_like(x)
    dx[order] = sorted_dx
    return dx, product(dz.t(), x[order].t()), dz.sum(0)


@matmul_all_to_all_backward.register_fake
def _(dy, x, w, packed, destinations, counts, isa, group_name):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), dy.new_empty(dy.shape[1], x.shape[1]), dy.new_empty(dy.shape[1])


def _all_to_all_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, packed, _, destinations, _, _, ctx.isa, ctx.group_name, _ = inputs
    ctx.save_for_backward(x, w, packed, destinations, output[1])
    ctx.mark_non_differentiable(output[1])


def _all_to_all_backward(ctx, dy: Tensor, _):  # type: ignore[no-untyped-def]
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    dx, dw, db = matmul_all_to_all_backward(dy, *ctx.saved_tensors, ctx.isa, ctx.group_name)
    return dx if needs_x else None, dw if needs_w else None, None, db if needs_bias else None, *(None,) * 6


matmul_all_to_all.register_autograd(_all_to_all_backward, setup_context=_all_to_all_setup)
refuse_second_order(matmul_all_to_all_backward)


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
