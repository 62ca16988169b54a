"""Matmuls whose input or output travels, on two streams.

**The input travels**: tiles start as their rows arrive.

    side      | rows of rank r - 1, tell | rows of rank r - 2, tell | ...
    compute   | matmul: tiles of own rows, then of those that have arrived, each waiting for the counter of its rows

Rows come by copies out of the other ranks' memory where that is mapped, otherwise by messages: at each step every rank
sends to one and receives from one, so that all links are busy. Chunks, counters and the order of tiles are those of
`weft.overlap.incoming`, for ranks that share no window.

**The output travels**: by collectives of a process group, or straight into the memory of its owner.

*By collectives*, group of tiles by group of tiles.

    compute   | matmul: group 0 | group 1 | group 2 |                       | rest of the model
    side      |      wait for 0 | collective 0 | wait for 1, collective 1 | 2 |

The matmul's epilogue stores each group of tiles end to end and counts them. On the other stream a waiting kernel holds
each collective back until its group is stored. All-reduce is cut along rows where that is possible, so that a group is
a slice of the output itself; reduce-scatter and all-to-all along columns, so that each group has rows for every rank.

*To owners* (reduce-scatter, where memory is mapped): the epilogue writes each tile into the buffer of the rank that
owns it.

    compute   | barrier | matmul, each tile to its owner's memory, one signal there | sum of all ranks' parts |

Rank r starts with the tiles of rank r + 1, so that no two ranks write to one at the same time. Parts are added in rank
order, so the bits depend on no timing.

This has never run on a GPU: it was run with threads for streams, gloo, windows, and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels import PackedWeight, Ready, TileSchedule, Tiling
from weft.kernels import triton as kernels
from weft.overlap.blocks import Axis, Block, Cut, cut_cols, cut_rows
from weft.overlap.executor.resources import view
from weft.overlap.incoming import ExpectRows, Incoming, RowArrival, SendRows, lower
from weft.overlap.plan import OverlapPlan, Transport
from weft.overlap.streams.device import Peers
from weft.overlap.streams.state import State, as_bytes, by_group


@dataclass(frozen=True, eq=False)
class _GatherTables:
    program: Incoming
    schedule: kernels.DeviceSchedule
    start: Tensor  # what each counter starts at, so that all are full at the same value
    full: int


def _gather_tables(plan: OverlapPlan, rank: int, like: Tensor) -> _GatherTables:
    program = lower(replace(plan, transport=Transport.MESSAGES), rank)
    full = max(program.needs, default=0)
    start = torch.tensor([full - need for need in program.needs], dtype=torch.int32, device=like.device)
    return _GatherTables(program, kernels.DeviceSchedule.of(program.schedule(), like.device), start, full)


@dataclass(frozen=True)
class _Step:
    """One chunk to the rank that is `away` places on, and one from the rank that is as many places back."""

    number: int
    away: int
    send: SendRows | None
    expect: ExpectRows | None


def _steps(program: Incoming, rank: int, size: int) -> Iterator[_Step]:
    sends = {(s.tag, s.peer): s for s in program.sends}
    expects = {(e.tag, e.peer): e for e in program.expects}
    for tag in sorted({tag for tag, _ in (*sends, *expects)}):
        for away in range(1, size):
            send, expect = sends.get((tag, (rank + away) % size)), expects.get((tag, (rank - away) % size))
            if send is not None or expect is not None:
                yield _Step(tag, away, send, expect)


def all_gather(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor
) -> Tensor:
    """out [M, N] = X weight^T + bias for X [M, K], the rows of all ranks, which is returned."""
    tables = state.table(plan, lambda: _gather_tables(plan, state.rank, x))
    peers = state.peers(plan.shard_bounds[1] * plan.k * x.element_size()) if _by_copies(plan) else None
    compute, side = state.device.current(), state.device.side()
    gathered, counters = x.new_empty(plan.m, plan.k), tables.start.clone()
    first = plan.shard_bounds[state.rank]
    gathered[first : first + x.shape[0]] = x
    side.wait(compute.record())
    if peers is not None:
        side.run(partial(_offer, peers, state.rank, x))
    for step in _steps(tables.program, state.rank, state.size):
        if peers is None:
            what = f"{plan.op.value}: chunk {step.number} to and from the ranks {step.away} away"
            side.run(partial(by_group, what, partial(_exchange, state, step, x, gathered)))
        elif step.expect is not None:
            side.run(partial(_copy, peers, plan, step.expect, gathered))
        if step.expect is not None:
            rows = tables.program.touched(RowArrival(state.rank, step.expect.m0, step.expect.m1))
            side.run(partial(kernels.tell, counters, first=rows.start, count=len(rows)))
    if peers is not None:
        side.run(peers.barrier)  # nobody reads this rank's rows any more
    ready = None
    if plan.sequential:
        compute.wait(side.record())
    elif tables.full:
        ready = Ready(counters, plan.tile_m, tables.full, timeout=state.timeout, what=plan.op.value)
    # After all that it waits for: where streams share one queue of the hardware, it would hold that back.
    compute.run(partial(
        kernels.linear, gathered, weight.data, weight.n, out=out, bias=bias, isa_name=weight.isa,
        schedule=tables.schedule, ready=ready, late=state.late,
    ))  # fmt: skip
    compute.wait(side.record())
    return gathered


def _by_copies(plan: OverlapPlan) -> bool:
    return plan.transport is Transport.WINDOWS


def _offer(peers: Peers, rank: int, x: Tensor) -> None:
    view(peers.memory(rank), x.dtype, 0, *x.shape).copy_(x)
    peers.barrier()


def _copy(peers: Peers, plan: OverlapPlan, expect: ExpectRows, gathered: Tensor) -> None:
    start = (expect.m0 - plan.shard_bounds[expect.peer]) * plan.k
    rows = view(peers.memory(expect.peer), gathered.dtype, start, expect.m1 - expect.m0, plan.k)
    gathered[expect.m0 : expect.m1].copy_(rows)


def _exchange(state: State, step: _Step, x: Tensor, gathered: Tensor) -> None:
    ops, tag = [], state.line.data(step.number)
    if step.send is not None and x.numel():
        data = as_bytes(x[step.send.start : step.send.end])
        ops.append(dist.P2POp(dist.isend, data, group=state.pg, group_peer=step.send.peer, tag=tag))
    if step.expect is not None and gathered.numel():
        data = as_bytes(gathered[step.expect.m0 : step.expect.m1])
        ops.append(dist.P2POp(dist.irecv, data, group=state.pg, group_peer=step.expect.peer, tag=tag))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


@dataclass(frozen=True, eq=False)
class _Tables:
    """A cut on the device. `offsets` are the bytes at which each tile is stored, `strides` the distance of its rows."""

    cut: Cut
    schedule: kernels.DeviceSchedule
    sizes: Tensor
    offsets: Tensor
    strides: Tensor


def _tables(plan: OverlapPlan, tiling: Tiling, stored_rows: int, like: Tensor) -> _Tables:
    """Blocks of columns are stored with `stored_rows` rows each, which may be more than they have."""
    if plan.axis is Axis.COLS:
        cut = cut_cols(tiling, plan.weights)
    else:
        cut = cut_rows(tiling, plan.weights, range(tiling.rows))
    schedule = cut.schedule()
    offsets, strides = [0] * tiling.count, [0] * tiling.count
    for block in cut.blocks:
        for tile in cut.tiles(block):
            m0, _, n0, _ = tiling.box(tile)
            at = stored_rows * block.n0 + m0 * block.cols + n0 - block.n0
            offsets[tile], strides[tile] = at * like.element_size(), block.cols
    return _Tables(
        cut, kernels.DeviceSchedule.of(schedule, like.device), schedule.group_sizes.to(like.device),
        torch.tensor(offsets, dtype=torch.int64, device=like.device),
        torch.tensor(strides, dtype=torch.int64, device=like.device),
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
        out = kernels.DevicePlaces(tables.cut.tiling, addresses, tables.strides, x.dtype, (target,))
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
    tables = _tables(plan, Tiling(m, plan.n, plan.tile_m, plan.tile_n), m, x)
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
    places: kernels.DevicePlaces
    done: Tensor  # the address of this rank's counter at each owner that has rows
    tiles: int  # that each rank computes for this one


def _owner_tables(plan: OverlapPlan, rank: int, peers: Peers, like: Tensor) -> _OwnerTables:
    tiling, bounds = plan.tiling, plan.shard_bounds
    owners = [p for p in range(plan.size) if bounds[p] < bounds[p + 1]]
    starts = [
        peers.memory(p).data_ptr() + rank * (bounds[p + 1] - bounds[p]) * plan.n * like.element_size()
        for p in range(plan.size)
    ]
    group_of = [tiling.box(tile)[0] // bounds[1] for tile in range(tiling.count)]
    schedule = TileSchedule(tiling, order=kernels.owners_first(tiling, bounds, rank), group_of=group_of)
    done = [peers.counters(p).data_ptr() + rank * 4 for p in owners]
    mine = bounds[rank + 1] - bounds[rank]
    return _OwnerTables(
        kernels.DeviceSchedule.of(schedule, like.device),
        kernels.DevicePlaces.by_owner(tiling, bounds, starts, like.dtype, like.device),
        torch.tensor(done, dtype=torch.int64, device=like.device),
        -(-mine // plan.tile_m) * tiling.cols,
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
        kernels.linear, x, weight.data, weight.n, out=tables.places, isa_name=weight.isa, schedule=tables.schedule,
        done=tables.done, late=state.late,
    ))  # fmt: skip
    if meanwhile is not None:
        meanwhile()
    compute.run(finish)
