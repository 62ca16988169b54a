"""Matmuls whose input travels, on two streams: tiles start as their rows arrive.

    side      | rows of rank r + 1, step 1 | rows of rank r + 2, step 2 | ...
    compute   | matmul: tiles of own rows, then of the rows of each step, in the order of the steps

Rows come by copies out of the other ranks' memory where that is mapped, otherwise by messages: at each step every rank
sends to one and receives from one, so that all links are busy. Chunks and the order of tile rows are those of
`weft.overlap.incoming`, for ranks that share no window; `fetches` brings rows in that order.

One counter says how many steps are over, and each row of tiles waits until it is high enough. The stream that brings
rows writes it, which takes no multiprocessor. The matmul is persistent, with fewer programs than there are places
(`Device.gather_budget`): tiles that wait must not keep what they wait for from starting.

This has never run on a GPU: it was run with threads for streams, gloo, windows, and Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels import PackedWeight, TileSchedule
from weft.kernels import triton as kernels
from weft.overlap.executor.resources import view
from weft.overlap.incoming import ExpectRows, Incoming, RowArrival, SendRows, lower
from weft.overlap.plan import OverlapPlan, Transport
from weft.overlap.streams.device import Peers
from weft.overlap.streams.state import State, as_bytes, by_group


@dataclass(frozen=True)
class Fetch:
    """One chunk from the rank that is `away` places on, and one to the rank that is as many places back."""

    number: int
    away: int
    send: SendRows | None
    expect: ExpectRows | None


@dataclass(frozen=True)
class GatherProgram:
    """What one rank does: `fetches` in order, and tiles in `order`; tile row i waits until `steps[i]` chunks came."""

    incoming: Incoming
    fetches: tuple[Fetch, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]


def lower_gather(plan: OverlapPlan, rank: int) -> GatherProgram:
    """The program of a rank. Tile rows whose rows of x come at the same step are computed in bands.

    >>> from weft.overlap.plan import Op
    >>> plan = OverlapPlan(Op.ALL_GATHER, 96, 64, 8, "float32", (0, 0, 0), tile_m=16, tile_n=32, groups=(1, 1))
    >>> program = lower_gather(plan, 0)
    >>> [fetch.expect.peer for fetch in program.fetches], program.steps
    ([1, 2, 1, 2], (0, 0, 1, 3, 2, 4))
    """
    incoming = lower(replace(plan, transport=Transport.MESSAGES), rank)
    fetches = _fetches(incoming, rank, plan.size)
    steps, number = [0] * incoming.tiling.rows, 0
    for fetch in fetches:
        if fetch.expect is not None:
            number += 1
            for row in incoming.touched(RowArrival(rank, fetch.expect.m0, fetch.expect.m1)):
                steps[row] = number
    cols = range(incoming.tiling.cols)
    order: list[int] = []
    for _, rows in groupby(incoming.tile_rows, key=steps.__getitem__):
        order += kernels.banded([*rows], cols, len(cols), order)
    return GatherProgram(incoming, fetches, tuple(steps), tuple(order))


def _fetches(program: Incoming, rank: int, size: int) -> tuple[Fetch, ...]:
    """First chunks first, and of each the next rank's first: in the order of `Incoming.tile_rows`."""
    sends = {(s.tag, s.peer): s for s in program.sends}
    expects = {(e.tag, e.peer): e for e in program.expects}
    found = [
        Fetch(tag, away, sends.get((tag, (rank - away) % size)), expects.get((tag, (rank + away) % size)))
        for tag in sorted({tag for tag, _ in (*sends, *expects)})
        for away in range(1, size)
    ]
    return tuple(fetch for fetch in found if fetch.send is not None or fetch.expect is not None)


@dataclass(frozen=True, eq=False)
class _Tables:
    program: GatherProgram
    schedule: kernels.DeviceSchedule
    steps: Tensor


def _tables(plan: OverlapPlan, rank: int, like: Tensor) -> _Tables:
    program = lower_gather(plan, rank)
    schedule = TileSchedule(program.incoming.tiling, order=program.order)
    steps = torch.tensor(program.steps, dtype=torch.int32, device=like.device)
    return _Tables(program, kernels.DeviceSchedule.of(schedule, like.device), steps)


def all_gather(
    state: State, plan: OverlapPlan, x: Tensor, weight: PackedWeight, *, bias: Tensor | None, out: Tensor
) -> Tensor:
    """out [M, N] = X weight^T + bias for X [M, K], the rows of all ranks, which is returned."""
    tables = state.table(plan, lambda: _tables(plan, state.rank, x))
    copies = plan.transport is Transport.WINDOWS
    peers = state.peers(plan.shard_bounds[1] * plan.k * x.element_size()) if copies else None
    compute, side = state.device.current(), state.device.side()
    gathered = x.new_empty(plan.m, plan.k)
    progress = torch.zeros(1, dtype=torch.int32, device=x.device)
    first = plan.shard_bounds[state.rank]
    gathered[first : first + x.shape[0]] = x
    side.wait(compute.record())
    steps = _bring(state, plan, tables.program, peers, x, gathered, progress)
    ready, programs = None, None
    if plan.sequential:
        compute.wait(side.record())
    elif steps:
        ready = kernels.RowSteps(progress, tables.steps, plan.tile_m, timeout=state.timeout, what=plan.op.value)
        programs = state.device.gather_budget(x.dtype, messages=not copies).programs
    # After all that it waits for: where streams share one queue of the hardware, it would hold that back.
    compute.run(partial(
        kernels.linear, gathered, weight.data, weight.n, out=out, bias=bias, isa_name=weight.isa,
        schedule=tables.schedule, ready=ready, late=state.late, programs=programs,
    ))  # fmt: skip
    compute.wait(side.record())
    return gathered


def _bring(
    state: State, plan: OverlapPlan, program: GatherProgram, peers: Peers | None, x: Tensor, gathered: Tensor,
    progress: Tensor,
) -> int:  # fmt: skip
    """Puts all fetches into the other stream, each with its step; how many steps that are."""
    side, step = state.device.side(), 0
    if peers is not None:
        side.run(partial(_offer, peers, state.rank, x))
    for fetch in program.fetches:
        if peers is None:
            what = f"{plan.op.value}: chunk {fetch.number} to and from the ranks {fetch.away} away"
            side.run(partial(by_group, what, partial(_exchange, state, fetch, x, gathered)))
        elif fetch.expect is not None:
            side.run(partial(_copy, peers, plan, fetch.expect, gathered))
        if fetch.expect is not None:
            step += 1
            side.run(partial(state.device.tell, progress, step))
    if peers is not None:
        side.run(peers.barrier)  # nobody reads this rank's rows any more
    return step


def _offer(peers: Peers, rank: int, x: Tensor) -> None:
    view(peers.memory(rank), x.dtype, 0, *x.shape).copy_(x)
    peers.barrier()


def _copy(peers: Peers, plan: OverlapPlan, expect: ExpectRows, gathered: Tensor) -> None:
    start = (expect.m0 - plan.shard_bounds[expect.peer]) * plan.k
    rows = view(peers.memory(expect.peer), gathered.dtype, start, expect.m1 - expect.m0, plan.k)
    gathered[expect.m0 : expect.m1].copy_(rows)


def _exchange(state: State, fetch: Fetch, x: Tensor, gathered: Tensor) -> None:
    ops, tag = [], state.line.data(fetch.number)
    if fetch.send is not None and x.numel():
        data = as_bytes(x[fetch.send.start : fetch.send.end])
        ops.append(dist.P2POp(dist.isend, data, group=state.pg, group_peer=fetch.send.peer, tag=tag))
    if fetch.expect is not None and gathered.numel():
        data = as_bytes(gathered[fetch.expect.m0 : fetch.expect.m1])
        ops.append(dist.P2POp(dist.irecv, data, group=state.pg, group_peer=fetch.expect.peer, tag=tag))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
