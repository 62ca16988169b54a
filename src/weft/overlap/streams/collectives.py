"""Matmuls whose output travels, on two streams: by collectives of a process group, or straight into its owner's memory.

*By collectives*, group of tiles by group of tiles.

    compute   | matmul: group 0 | group 1 | group 2 |                       | rest of the model
    side      |      wait for 0 | collective 0 | wait for 1, collective 1 | 2 |

The matmul's epilogue stores each group of tiles end to end and counts them. On the other stream a waiting kernel holds
each collective back until its group is stored. All-reduce is cut along rows where that is possible, so that a group is
a slice of the output itself; reduce-scatter and all-to-all along columns, so that each group has rows for every rank.

*To owners* (reduce-scatter, where memory is mapped): the epilogue writes each tile into the buffer of the rank that
owns it.

    compute   | barrier | matmul, each tile to its owner's memory, one signal there | sum of all ranks' parts |

Rank r starts with the tiles of rank r + 1, so that no two ranks write to one at the same time. Rows have addresses of
their own, so that a tile may have rows of several owners and signals to each. Parts are added in rank order, so the
bits depend on no timing.

Inside a group, or what one owner has, tiles are taken in bands (`kernels.banded`), so that those that are computed
at the same time share what they read.

This has never run on a GPU: it was run with threads for streams, gloo, windows, and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels import PackedWeight, Ready, TileSchedule, Tiling
from weft.kernels import triton as kernels
from weft.kernels.triton.launch import all_aligned
from weft.overlap.blocks import Axis, Block, Cut, cut_cols, cut_rows, rows_by_destination
from weft.overlap.executor.resources import view
from weft.overlap.plan import OverlapPlan
from weft.overlap.streams.device import Peers
from weft.overlap.streams.state import State, as_bytes, by_group


@dataclass(frozen=True, eq=False)
class _Tables:
    """A cut on the device. `offsets` are the bytes at which each tile is stored, `strides` the distance of its rows."""

    cut: Cut
    schedule: kernels.DeviceSchedule
    sizes: Tensor
    offsets: Tensor
    strides: Tensor
    aligned: bool  # all of both are multiples of 16 bytes


def _tables(plan: OverlapPlan, tiling: Tiling, stored_rows: int, like: Tensor) -> _Tables:
    """Blocks of columns are stored with `stored_rows` rows each, which may be more than they have."""
    if plan.axis is Axis.COLS:
        cut = cut_cols(tiling, plan.weights)
    else:
        cut = cut_rows(tiling, plan.weights, range(tiling.rows))
    order, group_of = list[int](), torch.zeros(tiling.rows, tiling.cols, dtype=torch.int32, device="cpu")
    offsets, strides = (torch.zeros(tiling.rows, tiling.cols, dtype=torch.int64, device="cpu") for _ in range(2))
    for number, block in enumerate(cut.blocks):
        rows = range(block.m0 // tiling.tile_m, -(-block.m1 // tiling.tile_m))
        cols = range(block.n0 // tiling.tile_n, -(-block.n1 // tiling.tile_n))
        order += kernels.banded(rows, cols, tiling.cols, order)
        box = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        m0 = torch.arange(rows.start, rows.stop, device="cpu")[:, None] * tiling.tile_m
        n0 = torch.arange(cols.start, cols.stop, device="cpu")[None, :] * tiling.tile_n
        offsets[box] = (stored_rows * block.n0 + m0 * block.cols + n0 - block.n0) * like.element_size()
        group_of[box], strides[box] = number, block.cols
    schedule = TileSchedule(tiling, order=order, group_of=group_of.view(-1))
    return _Tables(
        cut, kernels.DeviceSchedule.of(schedule, like.device), schedule.group_sizes.to(like.device),
        offsets.view(-1).to(like.device), strides.view(-1).to(like.device),
        aligned=all_aligned(offsets) and all_aligned(strides * like.element_size()),
    )  # fmt: skip


Send = Callable[[Block], object]


def _run(
    state: State, plan: OverlapPlan, tables: _Tables, x: Tensor, weight: PackedWeight, *, bias: Tensor | None,
    target: Tensor, send: Send, meanwhile: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Computes x weight^T into `target`, [M, N] or flat, and calls `send` on the other stream as blocks are stored."""
    compute, side = state.device.current(), state.device.side()
    done = torch.zeros(max(1, len(tables.cut.blocks)), dtype=torch.int32, device=x.device)
    out: Tensor | kernels.DevicePlaces = target
    if target.dim() == 1:
        addresses = tables.offsets + target.data_ptr()
        aligned = tables.aligned and target.data_ptr() % 16 == 0
        out = kernels.DevicePlaces(tables.cut.tiling, addresses, tables.strides, x.dtype, (target,), aligned)
    began = compute.record()
    # Before its waiters: where streams share one queue of the hardware, these would hold the matmul back.
    compute.run(partial(
        kernels.linear, x, weight.data, weight.n, out=out, bias=bias, isa_name=weight.isa, schedule=tables.schedule,
        done=done, late=state.late,
    ))  # fmt: skip
    side.wait(compute.record() if plan.sequential else began)
    for number, block in enumerate(tables.cut.blocks):
        if not plan.sequential:
            side.run(partial(
                kernels.wait, done, tables.sizes, first=number, count=1, timeout=state.timeout, late=state.late
            ))  # fmt: skip
        side.run(partial(by_group, f"{plan.op.value}: group {number}", partial(send, block)))
    if meanwhile is not None:
        meanwhile()
    compute.wait(side.record())  # also keeps buffers of this call from being used again before


def all_reduce(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor,
    meanwhile: Callable[[], None] | None,
) -> None:  # fmt: skip
    """out [M, N] = the sum over ranks of x weight^T, + bias, which one rank's epilogue adds."""
    tables = state.table(plan, lambda: _tables(plan, plan.tiling, plan.m, x))
    rows = plan.axis is Axis.ROWS
    buffer = out if rows else x.new_empty(plan.m * plan.n)

    def send(block: Block) -> None:
        stored = buffer.view(-1)[block.at : block.at + block.rows * block.cols]
        dist.all_reduce(stored, group=state.pg)
        if not rows:
            out[:, block.n0 : block.n1] = stored.view(block.rows, block.cols)

    own_bias = bias if state.rank == 0 else None
    _run(state, plan, tables, x, weight, bias=own_bias, target=buffer, send=send, meanwhile=meanwhile)


def reduce_scatter(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor,
    meanwhile: Callable[[], None] | None,
) -> None:  # fmt: skip
    """out [m_r, N] = this rank's rows of the sum over ranks of x weight^T, + bias.

    Collectives want as many rows of every rank, so blocks are stored with the rows that the last ranks lack; what
    lies there goes nowhere.
    """
    shard = plan.shard_bounds[1]
    stored_rows = shard * state.size
    tables = state.table(plan, lambda: _tables(plan, plan.tiling, stored_rows, x))
    buffer, received = x.new_empty(stored_rows * plan.n), x.new_empty(shard * plan.n)

    def send(block: Block) -> None:
        mine = received[shard * block.n0 : shard * block.n1].view(shard, block.cols)
        stored = buffer[stored_rows * block.n0 : stored_rows * block.n1].view(stored_rows, block.cols)
        dist.reduce_scatter_single(mine, stored, group=state.pg)
        out[:, block.n0 : block.n1] = mine[: out.shape[0]]

    own_bias = bias if state.rank == 0 else None
    _run(state, plan, tables, x, weight, bias=own_bias, target=buffer, send=send, meanwhile=meanwhile)


def all_to_all(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor,
    sent: list[int], taken: list[int],
) -> None:  # fmt: skip
    """Rows of x weight^T + bias, sorted by destination, to where they belong: `sent` and `taken` rows a rank."""
    m = x.shape[0]
    # A rank without rows takes part in the same collectives as the others.
    tables = state.table(plan, lambda: _tables(plan, plan.tiling, m, x))
    columns = tables.cut.blocks or cut_cols(Tiling(1, plan.n, 1, plan.tile_n), plan.weights).blocks
    buffer, received = x.new_empty(m * plan.n), x.new_empty(out.shape[0] * plan.n)

    def send(block: Block) -> None:
        mine = received[out.shape[0] * block.n0 : out.shape[0] * block.n1].view(-1, block.cols)
        stored = buffer[m * block.n0 : m * block.n1].view(-1, block.cols)
        dist.all_to_all_single(as_bytes(mine), as_bytes(stored), taken, sent, group=state.pg)
        out[:, block.n0 : block.n1] = mine

    if m:
        _run(state, plan, tables, x, weight, bias=bias, target=buffer, send=send)
        return
    side, compute = state.device.side(), state.device.current()
    side.wait(compute.record())
    for block in columns:
        side.run(partial(by_group, f"{plan.op.value}: columns {block.n0} to {block.n1}", partial(send, block)))
    compute.wait(side.record())


@dataclass(frozen=True, eq=False)
class _OwnerTables:
    schedule: kernels.DeviceSchedule
    rows: kernels.OwnerRows
    done: Tensor  # the address of this rank's counter at each owner that has rows
    tiles: int  # that each rank computes for this one


def owner_order(tiling: Tiling, bounds: Sequence[int], rank: int) -> list[int]:
    """The tiles in the order of their owners rank + 1, rank + 2, ..., rank: no two ranks write to one peer at once.

    Those of an owner are taken in bands. A tile with rows of two owners comes with the first of these.

    >>> owner_order(Tiling(4, 64, 1, 32), [0, 2, 4], rank=0)
    [4, 6, 5, 7, 3, 1, 2, 0]
    """
    ranks, seen, order = len(bounds) - 1, set[int](), list[int]()
    for owner in ((rank + 1 + i) % ranks for i in range(ranks)):
        rows = [row for row in rows_by_destination(tiling, bounds, [owner]) if row not in seen]
        seen.update(rows)
        order += kernels.banded(rows, range(tiling.cols), tiling.cols, order)
    return order


def _owner_tables(plan: OverlapPlan, rank: int, peers: Peers, like: Tensor) -> _OwnerTables:
    tiling, bounds = plan.tiling, plan.shard_bounds
    owners = [p for p in range(plan.size) if bounds[p] < bounds[p + 1]]
    starts = [
        peers.memory(p).data_ptr() + rank * (bounds[p + 1] - bounds[p]) * plan.n * like.element_size()
        for p in range(plan.size)
    ]
    schedule = TileSchedule(tiling, order=owner_order(tiling, bounds, rank))
    done = [peers.counters(p).data_ptr() + rank * 4 for p in owners]
    return _OwnerTables(
        kernels.DeviceSchedule.of(schedule, like.device),
        kernels.OwnerRows.of(bounds, starts, plan.n, like.dtype, like.device),
        torch.tensor(done, dtype=torch.int64, device=like.device),
        len(rows_by_destination(tiling, bounds, [rank])) * tiling.cols,
    )


def reduce_scatter_to_owners(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor,
    meanwhile: Callable[[], None] | None,
) -> None:  # fmt: skip
    """out [m_r, N] = this rank's rows of the sum over ranks of x weight^T, + bias."""
    peers = state.peers(plan.shard_bounds[1] * plan.n * x.element_size() * state.size)
    tables = state.table(plan, lambda: _owner_tables(plan, state.rank, peers, x))
    counters, compute = peers.counters(state.rank), state.device.current()
    parts = view(peers.memory(state.rank), x.dtype, 0, state.size * out.shape[0], plan.n)

    def begin() -> None:
        counters.zero_()  # all signals of the last call have come, or its sum would not have ended
        peers.barrier()  # and all ranks have added up what they wrote there

    def finish() -> None:
        ready = Ready(counters, 1, tables.tiles, timeout=state.timeout, what="parts of ranks")
        kernels.sum_in_order(parts.view(state.size, *out.shape), out=out, bias=bias, ready=ready, late=state.late)

    compute.run(begin)
    compute.run(partial(
        kernels.linear, x, weight.data, weight.n, out=tables.rows, isa_name=weight.isa, schedule=tables.schedule,
        done=tables.done, late=state.late,
    ))  # fmt: skip
    if meanwhile is not None:
        meanwhile()
    compute.run(finish)
