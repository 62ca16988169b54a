"""Overlapped matmuls on devices with streams: the executor of GPUs. Its functions are those of `MatmulExecutor`.

gather       matmuls whose input travels
collectives  matmuls whose output travels
state        what is kept for a group: streams, the other ranks' memory, tables, late kernels
plans        what the search of group sizes is told of such devices; which plans they can follow
device       streams and mapped memory: of a GPU, and the same with threads and windows on a CPU

A call puts everything into two streams and returns: the host waits for nothing, so a call can be captured in a graph
after one that was not. Every kernel that waits has the group's timeout; one that gave up sets a flag, which a later
call, or `check`, turns into `PeerTimeout`.

None of this has ever run on a GPU (docs/gpu.md): it was run with threads for streams, gloo and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels import PackedWeight
from weft.kernels import triton as kernels
from weft.overlap.executor.call import Request, exchange_counts, row_major
from weft.overlap.executor.context import Context
from weft.overlap.plan import Op, Transport
from weft.overlap.streams.collectives import (
    all_reduce,
    all_to_all,
    reduce_scatter,
    reduce_scatter_to_owners,
)
from weft.overlap.streams.gather import all_gather
from weft.overlap.streams.state import as_bytes, by_group, check, state_of

__all__ = ["check", "gather_matmul", "gather_rows_matmul", "matmul_scatter", "matmul_scatter_rows"]


def gather_matmul(
    context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """All-gather x [m_r, K], times weight [N, K] -> [m, N]; and the gathered x [m, K] if `keep`, else [0, K]."""
    x = row_major(x)
    y = x.new_empty(m, weight.n)
    with context.call() as call:
        state = state_of(context, x)
        found = state.plan(Request(Op.ALL_GATHER, m, weight.n, weight.k, x.dtype, plan, bias is not None))
        with state.call(found, call.deadline, bias=bias is not None):
            gathered = all_gather(state, found, x, weight, bias=bias, out=y)
    return y, gathered if keep else x.new_empty(0, weight.k)


def matmul_scatter(
    context: Context,
    op: Op,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None,
    plan: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """x [M, K_r] times weight [N, K_r], summed over ranks: this rank's rows of it, or all (all-reduce)."""
    x = row_major(x)
    with context.call() as call:
        state = state_of(context, x)
        found = state.plan(Request(op, x.shape[0], weight.n, weight.k, x.dtype, plan, bias is not None))
        bounds = found.shard_bounds
        rows = found.m if op is Op.ALL_REDUCE else bounds[state.rank + 1] - bounds[state.rank]
        y = x.new_empty(rows, weight.n)
        run = all_reduce if op is Op.ALL_REDUCE else reduce_scatter
        if op is Op.REDUCE_SCATTER and found.transport is Transport.WINDOWS:
            run = reduce_scatter_to_owners
        with state.call(found, call.deadline, bias=bias is not None):
            run(state, found, x, weight, bias=bias, out=y, meanwhile=meanwhile)
    return y


def matmul_scatter_rows(
    context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    """x [M, K] times weight [N, K], row i to rank destinations[i] -> [R, N]; and the counts int64 [P, P].

    How many rows come is a size, so the host waits for the destinations: this call cannot be captured.
    """
    x = row_major(x)
    with context.call() as call:
        state = state_of(context, x)
        request = Request(Op.ALL_TO_ALL, x.shape[0], weight.n, weight.k, x.dtype, plan, bias is not None)
        found = state.plan(request)
        with state.call(found, call.deadline, bias=bias is not None):
            counts = exchange_counts(context, call, destinations.cpu())
            sent, taken = list(counts[state.rank]), [row[state.rank] for row in counts]
            y = x.new_empty(sum(taken), weight.n)
            in_order = x.index_select(0, torch.argsort(destinations, stable=True))
            all_to_all(state, found, in_order, weight, bias=bias, out=y, sent=sent, taken=taken)
    return y, torch.tensor(counts)


def gather_rows_matmul(context: Context, x: Tensor, weight: PackedWeight, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: x [R, K] returns to the ranks that its rows came from, times weight [N, K] -> [M, N].

    Both results, the product and the gathered x [M, K], are in the order of destinations. Not overlapped.
    """
    table = counts.tolist()
    x = row_major(x)
    with context.call() as call:
        state = state_of(context, x)
        back, taken = [row[state.rank] for row in table], table[state.rank]
        gathered = x.new_empty(sum(taken), weight.k)
        found = state.plan(Request(Op.GATHER_BACK, gathered.shape[0], weight.n, weight.k, x.dtype, "", bias=False))
        with state.call(found, call.deadline, bias=False):
            exchange = dist.all_to_all_single
            y = x.new_empty(gathered.shape[0], weight.n)
            compute = state.device.current()
            compute.run(lambda: by_group(
                found.op.value, lambda: exchange(as_bytes(gathered), as_bytes(x), taken, back, group=state.pg)
            ))  # fmt: skip
            compute.run(lambda: kernels.linear(gathered, weight.data, weight.n, out=y, isa_name=weight.isa))
    return y, gathered
