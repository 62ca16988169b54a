"""The ops in plain torch: the matmul, then the collective. What they compute, without any overlap.

Same arguments, shapes and gradients as the ops in `api`. Values agree closely, not to the bit: torch's matmul sums
in another order. Torch's own collectives want even shards, so these send uneven ones rank to rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.overlap.blocks import chunk_bounds


def _apply(function: Any, *args: object) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def all_gather_matmul(
    x_shard: Tensor, w: Tensor, *, group: ProcessGroup, bias: Tensor | None = None, m: int | None = None
) -> Tensor:
    """[m_r, K], [N, K] -> [M, N]"""
    total = x_shard.shape[0] * group.size() if m is None else m
    return torch.nn.functional.linear(_apply(_AllGather, x_shard, total, group), w, bias)


def matmul_reduce_scatter(x: Tensor, w_shard: Tensor, *, group: ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """[M, K_r], [N, K_r] -> [m_r, N]"""
    y = _apply(_ReduceScatter, x @ w_shard.t(), group)
    return y if bias is None else y + bias


def matmul_all_reduce(x: Tensor, w_shard: Tensor, *, group: ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """[M, K_r], [N, K_r] -> [M, N]"""
    y = _apply(_AllReduce, x @ w_shard.t(), group)
    return y if bias is None else y + bias


def matmul_all_to_all(
    x: Tensor, w: Tensor, destinations: Tensor, *, group: ProcessGroup, bias: Tensor | None = None
) -> Tensor:
    """[M, K], [N, K], [M] -> [R, N]"""
    order = torch.argsort(destinations, stable=True)
    counts = torch.bincount(destinations, minlength=group.size()).tolist()
    return _apply(_AllToAll, torch.nn.functional.linear(x, w, bias)[order], counts, group)


def _gather_rows(shard: Tensor, total: int, group: ProcessGroup) -> Tensor:
    bounds = chunk_bounds(total, group.size())
    parts = [shard.new_empty(bounds[r + 1] - bounds[r], *shard.shape[1:]) for r in range(group.size())]
    _exchange([shard.contiguous()] * group.size(), parts, group)
    return torch.cat(parts)


def _scatter_sum(whole: Tensor, group: ProcessGroup) -> Tensor:
    bounds = chunk_bounds(whole.shape[0], group.size())
    mine = whole[bounds[group.rank()] : bounds[group.rank() + 1]]
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    _exchange([whole[bounds[r] : bounds[r + 1]].contiguous() for r in range(group.size())], parts, group)
    return torch.stack([part.float() for part in parts]).sum(0).to(whole.dtype)


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], group: ProcessGroup) -> None:
    """outgoing[r] goes to rank r, incoming[r] comes from it."""
    works = []
    for peer in range(group.size()):
        if peer == group.rank():
            incoming[peer].copy_(outgoing[peer])
            continue
        if incoming[peer].numel():
            works.append(dist.irecv(incoming[peer], group=group, group_src=peer))
        if outgoing[peer].numel():
            works.append(dist.isend(outgoing[peer], group=group, group_dst=peer))
    for work in works:
        assert work is not None
        work.wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_rows(shard, total, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scatter_sum(grads[0], ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, whole.shape[0]
        return _scatter_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gather_rows(grads[0], ctx.total, ctx.group), None


class _AllReduce(torch.autograd.Function):
    """The sum is one value that all ranks hold, and so is its gradient: nothing to communicate on the way back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.float()
        dist.all_reduce(total, group=group)
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        theirs = [torch.zeros(1, dtype=torch.int64) for _ in counts]
        _exchange([torch.tensor([count]) for count in counts], theirs, group)
        ctx.group, ctx.counts, ctx.theirs = group, counts, [int(count) for count in theirs]
        return _swap(rows, counts, ctx.theirs, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swap(grads[0], ctx.theirs, ctx.counts, ctx.group), None, None


def _swap(rows: Tensor, counts: list[int], theirs: list[int], group: ProcessGroup) -> Tensor:
    incoming = [rows.new_empty(count, rows.shape[1]) for count in theirs]
    _exchange([part.contiguous() for part in torch.split(rows, counts)], incoming, group)
    return torch.cat(incoming)
