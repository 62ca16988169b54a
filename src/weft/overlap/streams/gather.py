"""Matmuls whose input travels: tiles start as their rows arrive.

    side      | rows of rank r - 1, tell | rows of rank r - 2, tell | ...
    compute   | matmul: tiles of own rows, then of those that have arrived, each waiting for the counter of its rows

Rows come by copies out of the other ranks' memory where that is mapped, otherwise by messages: at each step every rank
sends to one and receives from one, so that all links are busy. Chunks, counters and the order of tiles are those of
`programs.incoming`, for ranks that share no window.

This has never run on a GPU: it was run with threads for streams, gloo, and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels import PackedWeight, Ready
from weft.kernels import triton as kernels
from weft.overlap.executor.resources import view
from weft.overlap.plan import OverlapPlan, Transport
from weft.overlap.programs.incoming import ExpectRows, Incoming, RowArrival, SendRows, lower
from weft.overlap.streams.device import Peers
from weft.overlap.streams.state import State, as_bytes, by_group


@dataclass(frozen=True, eq=False)
class _Tables:
    program: Incoming
    schedule: kernels.DeviceSchedule
    start: Tensor  # what each counter starts at, so that all are full at the same value
    full: int


def _tables(plan: OverlapPlan, rank: int, like: Tensor) -> _Tables:
    program = lower(replace(plan, transport=Transport.MESSAGES), rank)
    full = max(program.needs, default=0)
    start = torch.tensor([full - need for need in program.needs], dtype=torch.int32, device=like.device)
    return _Tables(program, kernels.DeviceSchedule.of(program.schedule(), like.device), start, full)


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
    tables = state.table(plan, lambda: _tables(plan, state.rank, x))
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
    ops, tag = [], state.context.line.data(step.number)
    if step.send is not None and x.numel():
        data = as_bytes(x[step.send.start : step.send.end])
        ops.append(dist.P2POp(dist.isend, data, group=state.pg, group_peer=step.send.peer, tag=tag))
    if step.expect is not None and gathered.numel():
        data = as_bytes(gathered[step.expect.m0 : step.expect.m1])
        ops.append(dist.P2POp(dist.irecv, data, group=state.pg, group_peer=step.expect.peer, tag=tag))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
