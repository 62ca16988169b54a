"""The custom ops: what torch's dispatcher, autograd, compiler and flop counters see. `api` is what users call.

A group travels by its name, as in torch's functional collectives. A weight is `w`, dense, or `packed`, with the dense
one beside it when a gradient is wanted. Each backward is an op of its own, so that it overlaps when compiled too; it
has no gradient itself, and says so. Inside an op autocast is off: `api` has chosen the types by then. The shapes and
the equations head `api`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft._torch import group_by_name, op_name
from weft.kernels import PackedWeight
from weft.kernels.dispatch import refuse_tangents, without_autocast
from weft.kernels.matmul import product
from weft.overlap.blocks import chunk_bounds
from weft.overlap.executor.call import executor_for, multiply
from weft.overlap.executor.context import Context, context_by_name
from weft.overlap.executor.resources import pack
from weft.overlap.plan import Op

F = TypeVar("F", bound=Callable[..., Any])


def _in_given_types(kernel: F) -> F:
    """The body of an op, `without_autocast`."""

    @wraps(kernel)
    def run(first: Tensor, *rest: Any, **options: Any) -> Any:
        with without_autocast(first.device):
            return kernel(first, *rest, **options)

    return run  # type: ignore[return-value]


# all_gather_matmul ------------------------------------------------------------------------------------------


@torch.library.custom_op("weft::all_gather_matmul", mutates_args=())
@_in_given_types
def all_gather_matmul(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None,
    m: int, n: int, isa: str, group_name: str, plan: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = context_by_name(group_name)
    weight = _packed(context, w, packed, n, x.shape[1], isa)
    y, gathered = executor_for(context, x).gather_matmul(context, x, weight, m=m, bias=bias, plan=plan, keep=keep)
    return y, gathered.clone() if gathered is x else gathered  # an op's result is its own memory


@all_gather_matmul.register_fake
def _(x, w, packed, bias, m, n, isa, group_name, plan, keep):  # type: ignore[no-untyped-def]
    return x.new_empty(m, n), x.new_empty(m if keep else 0, x.shape[1])


@torch.library.custom_op("weft::all_gather_matmul_backward", mutates_args=())
@_in_given_types
def all_gather_matmul_backward(
    dy: Tensor, gathered: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx_shard = reduce_scatter(dy w), dw = dy^T x, which is computed while the last of dx travels."""
    return _column_gradients(Op.REDUCE_SCATTER, dy, gathered, w, packed, isa, group_name, needs_x, needs_w)


@all_gather_matmul_backward.register_fake
def _(dy, gathered, w, packed, isa, group_name, needs_x, needs_w):  # type: ignore[no-untyped-def]
    return _fake_gradients(dy, gathered, _shard_rows(dy.shape[0], group_name) if needs_x else 0, needs_w)


def _gather_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, w, packed, _, _, _, ctx.isa, ctx.group_name, _, _ = inputs
    ctx.save_for_backward(output[1], w, packed)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _gather_backward(ctx, dy: Tensor | None, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 10
    refuse_tangents("all_gather_matmul's backward", dy=dy)
    needs_x, needs_w, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        dx, dw = all_gather_matmul_backward(dy, *ctx.saved_tensors, ctx.isa, ctx.group_name, needs_x, needs_w)
    return _wanted(ctx, dy, dx, dw, others=6)


all_gather_matmul.register_autograd(_gather_backward, setup_context=_gather_setup)


# replicated_matmul ------------------------------------------------------------------------------------------


@torch.library.custom_op("weft::replicated_matmul", mutates_args=())
@_in_given_types
def replicated_matmul(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None, n: int, isa: str, group_name: str
) -> Tensor:
    return multiply(x, _packed(context_by_name(group_name), w, packed, n, x.shape[1], isa), bias)


@replicated_matmul.register_fake
def _(x, w, packed, bias, n, isa, group_name):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n)


@torch.library.custom_op("weft::replicated_matmul_backward", mutates_args=())
@_in_given_types
def replicated_matmul_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx = all_reduce(dy w), dw = dy^T x, which is computed while the last of dx travels."""
    return _column_gradients(Op.ALL_REDUCE, dy, x, w, packed, isa, group_name, needs_x, needs_w)


@replicated_matmul_backward.register_fake
def _(dy, x, w, packed, isa, group_name, needs_x, needs_w):  # type: ignore[no-untyped-def]
    return _fake_gradients(dy, x, x.shape[0] if needs_x else 0, needs_w)


def _replicated_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, packed, _, _, ctx.isa, ctx.group_name = inputs
    ctx.save_for_backward(x, w, packed)


def _replicated_backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    refuse_tangents("replicated_matmul's backward", dy=dy)
    needs_x, needs_w, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        dx, dw = replicated_matmul_backward(dy, *ctx.saved_tensors, ctx.isa, ctx.group_name, needs_x, needs_w)
    return _wanted(ctx, dy, dx, dw, others=3)


replicated_matmul.register_autograd(_replicated_backward, setup_context=_replicated_setup)


# matmul_reduce_scatter, matmul_all_reduce -------------------------------------------------------------------


@torch.library.custom_op("weft::matmul_reduce", mutates_args=())
@_in_given_types
def matmul_reduce(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None,
    op: str, n: int, isa: str, group_name: str, plan: str,
) -> Tensor:  # fmt: skip
    context = context_by_name(group_name)
    weight = _packed(context, w, packed, n, x.shape[1], isa)
    return executor_for(context, x).matmul_scatter(context, Op(op), x, weight, bias=bias, plan=plan)


@matmul_reduce.register_fake
def _(x, w, packed, bias, op, n, isa, group_name, plan):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0] if op == Op.ALL_REDUCE.value else _shard_rows(x.shape[0], group_name), n)


@torch.library.custom_op("weft::matmul_reduce_scatter_backward", mutates_args=())
@_in_given_types
def matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, isa: str, group_name: str, needs_w: bool
) -> tuple[Tensor, Tensor]:
    """dx = all_gather(dy_shard) w, dw = all_gather(dy_shard)^T x."""
    context = context_by_name(group_name)
    weight = _transposed(context, w, packed, dy.shape[1], x.shape[1], isa)
    executor = executor_for(context, dy)
    dx, gathered = executor.gather_matmul(context, dy, weight, m=x.shape[0], bias=None, plan="", keep=needs_w)
    return dx, product(gathered.t(), x.t()) if needs_w else dy.new_empty(0, x.shape[1])


@matmul_reduce_scatter_backward.register_fake
def _(dy, x, w, packed, isa, group_name, needs_w):  # type: ignore[no-untyped-def]
    return _fake_gradients(dy, x, x.shape[0], needs_w)


@torch.library.custom_op("weft::matmul_all_reduce_backward", mutates_args=())
@_in_given_types
def matmul_all_reduce_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, isa: str, needs_x: bool, needs_w: bool
) -> tuple[Tensor, Tensor]:
    """dx = dy w, dw = dy^T x: dy is the same on all ranks, so there is nothing to communicate."""
    dx, dw = dy.new_empty(0, x.shape[1]), dy.new_empty(0, x.shape[1])
    if needs_x:
        dx = product(dy, _dense(w, packed, dy.shape[1], x.shape[1], isa).t())
    if needs_w:
        dw = product(dy.t(), x.t())
    return dx, dw


@matmul_all_reduce_backward.register_fake
def _(dy, x, w, packed, isa, needs_x, needs_w):  # type: ignore[no-untyped-def]
    return _fake_gradients(dy, x, x.shape[0] if needs_x else 0, needs_w)


def _reduce_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, packed, _, ctx.op, _, ctx.isa, ctx.group_name, _ = inputs
    ctx.save_for_backward(x, w, packed)


def _reduce_backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    refuse_tangents(f"{ctx.op}'s backward", dy=dy)
    needs_x, needs_w, *_ = ctx.needs_input_grad
    dx = dw = None
    if needs_x or needs_w:
        if ctx.op == Op.ALL_REDUCE.value:
            dx, dw = matmul_all_reduce_backward(dy, *ctx.saved_tensors, ctx.isa, needs_x, needs_w)
        else:
            dx, dw = matmul_reduce_scatter_backward(dy, *ctx.saved_tensors, ctx.isa, ctx.group_name, needs_w)
    return _wanted(ctx, dy, dx, dw, others=5)


matmul_reduce.register_autograd(_reduce_backward, setup_context=_reduce_setup)


# matmul_all_to_all ------------------------------------------------------------------------------------------


@torch.library.custom_op("weft::matmul_all_to_all", mutates_args=())
@_in_given_types
def matmul_all_to_all(
    x: Tensor, w: Tensor | None, packed: Tensor | None, bias: Tensor | None, destinations: Tensor,
    rows: int, n: int, isa: str, group_name: str, plan: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = context_by_name(group_name)
    weight = _packed(context, w, packed, n, x.shape[1], isa)
    executor = executor_for(context, x)
    y, counts = executor.matmul_scatter_rows(context, x, weight, destinations, bias=bias, plan=plan)
    check_promise(rows, y, context.rank)
    return y, counts


def check_promise(rows: int, y: Tensor, rank: int) -> None:
    """Whether as many rows came as the caller said; -1 promises nothing."""
    if rows >= 0 and y.shape[0] != rows:
        raise ValueError(f"rows={rows} rows were promised to rank {rank}, but {y.shape[0]} came")


@matmul_all_to_all.register_fake
def _(x, w, packed, bias, destinations, rows, n, isa, group_name, plan):  # type: ignore[no-untyped-def]
    size = group_by_name(group_name).size()
    if rows < 0:
        rows = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(rows, n), torch.empty(size, size, dtype=torch.int64)


@torch.library.custom_op("weft::matmul_all_to_all_backward", mutates_args=())
@_in_given_types
def matmul_all_to_all_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None, destinations: Tensor, counts: Tensor,
    isa: str, group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dz = the rows of dy, back on the ranks that they came from; dx = dz w, dw = dz^T x, db = sum of dz."""
    context = context_by_name(group_name)
    weight = _transposed(context, w, packed, dy.shape[1], x.shape[1], isa)
    sorted_dx, dz = executor_for(context, dy).gather_rows_matmul(context, dy, weight, counts)
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
    refuse_tangents("matmul_all_to_all's backward", dy=dy)
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    dx, dw, db = matmul_all_to_all_backward(dy, *ctx.saved_tensors, ctx.isa, ctx.group_name)
    return dx if needs_x else None, dw if needs_w else None, None, db if needs_bias else None, *(None,) * 6


matmul_all_to_all.register_autograd(_all_to_all_backward, setup_context=_all_to_all_setup)


# What they share --------------------------------------------------------------------------------------------


def _packed(context: Context, w: Tensor | None, packed: Tensor | None, n: int, k: int, isa: str) -> PackedWeight:
    if packed is not None:
        return PackedWeight(packed, n, k, isa)
    assert w is not None
    return context.weights.packed(w)


def _transposed(context: Context, w: Tensor | None, packed: Tensor | None, n: int, k: int, isa: str) -> PackedWeight:
    """The transposed weight [K, N], which input gradients are multiplied with.

    Whoever packs by hand may have reasons to: then nothing is kept here either.
    """
    if packed is None:
        assert w is not None
        return context.weights.packed(w, transposed=True)
    return pack(_dense(w, packed, n, k, isa).t())


def _dense(w: Tensor | None, packed: Tensor | None, n: int, k: int, isa: str) -> Tensor:
    if w is not None:
        return w.detach()
    assert packed is not None
    return PackedWeight(packed, n, k, isa).to_dense()


def _column_gradients(
    op: Op, dy: Tensor, x: Tensor, w: Tensor | None, packed: Tensor | None,
    isa: str, group_name: str, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of a column-parallel matmul: dx = op(dy w), and dw = dy^T x, made while dx travels; empty where not needed."""
    context, k = context_by_name(group_name), x.shape[1]
    dw: list[Tensor] = []

    def weight_gradient() -> None:
        if needs_w:
            dw.append(product(dy.t(), x.t()))

    if needs_x:
        weight = _transposed(context, w, packed, dy.shape[1], k, isa)
        dx = executor_for(context, dy).matmul_scatter(context, op, dy, weight, bias=None, meanwhile=weight_gradient)
    else:
        weight_gradient()
        dx = dy.new_empty(0, k)
    return dx, dw[0] if dw else dy.new_empty(0, k)


def _shard_rows(m: int, group_name: str) -> int:
    """The rows of this rank, also while compiling, where there is no context."""
    pg = group_by_name(group_name)
    bounds = chunk_bounds(m, pg.size())
    return bounds[pg.rank() + 1] - bounds[pg.rank()]


def _fake_gradients(dy, x, rows: int, needs_w: bool):  # type: ignore[no-untyped-def]
    """dx [rows, K], and dw [N, K] or nothing."""
    k = x.shape[1]
    return dy.new_empty(rows, k), dy.new_empty(dy.shape[1] if needs_w else 0, k)


def _wanted(ctx, dy: Tensor, dx: Tensor | None, dw: Tensor | None, *, others: int):  # type: ignore[no-untyped-def]
    """The gradients of x, w, packed, bias and `others` inputs, None where there is none or nobody wants it."""
    needs_x, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
    db = dy.sum(0) if needs_bias else None
    return dx if needs_x else None, dw if needs_w else None, None, db, *(None,) * others


def _refuse_second_order(op: Any) -> None:
    """Makes a backward op say what is missing when someone asks for the gradient of a gradient."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"gradients of gradients through {op_name(op)} are not defined; leave out create_graph=True, or keep the "
            "overlapped op out of what is differentiated twice"
        )

    op.register_autograd(refuse)


for _op in (
    all_gather_matmul_backward,
    replicated_matmul_backward,
    matmul_reduce_scatter_backward,
    matmul_all_reduce_backward,
    matmul_all_to_all_backward,
):
    _refuse_second_order(_op)


def _column_flops(dy: Tensor, x: Tensor, *rest: Any, **_: Any) -> int:
    """dx = dy w and dw = dy^T x, of those that are wanted."""
    return (bool(rest[-2]) + bool(rest[-1])) * 2 * dy.numel() * x.shape[1]


# For torch's FlopCounterMode: the flops of this rank's matmuls, without sums.
FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.weft.all_gather_matmul: lambda x, w, p, b, m, n, *_, **__: 2 * m * n * x.shape[1],
    torch.ops.weft.all_gather_matmul_backward: _column_flops,
    torch.ops.weft.replicated_matmul: lambda x, w, p, b, n, *_, **__: 2 * x.numel() * n,
    torch.ops.weft.replicated_matmul_backward: _column_flops,
    torch.ops.weft.matmul_reduce: lambda x, w, p, b, op, n, *_, **__: 2 * x.numel() * n,
    # DY [M, N] is gathered from dy: dx = DY w, and dw = DY^T x if it is wanted.
    torch.ops.weft.matmul_reduce_scatter_backward: lambda dy, x, *rest, **__: (
        (1 + bool(rest[-1])) * 2 * x.numel() * dy.shape[1]
    ),
    torch.ops.weft.matmul_all_reduce_backward: _column_flops,
    torch.ops.weft.matmul_all_to_all: lambda x, w, p, b, to, rows, n, *_, **__: 2 * x.numel() * n,
    torch.ops.weft.matmul_all_to_all_backward: lambda dy, x, *_, **__: 4 * x.numel() * dy.shape[1],
}
