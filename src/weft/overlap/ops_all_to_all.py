"""The custom ops of `matmul_all_to_all`; see `ops.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from weft._torch import group_by_name
from weft.kernels.matmul import product
from weft.overlap import calls
from weft.overlap.autocast import without_autocast
from weft.overlap.context import context_by_name
from weft.overlap.executors import executor_for
from weft.overlap.once import refuse_second_order
from weft.overlap.ops import packed_weight, transposed_weight


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
