"""matmul_reduce_scatter without collectives: the epilogue writes each tile into the buffer of the rank that owns it.

    compute   | barrier | matmul, each tile to its owner's memory, one signal there | sum of all ranks' parts |

Rank r starts with the tiles of rank r + 1, so that no two ranks write to one at the same time. Parts are added in rank
order, so the bits depend on no timing.

This has never run on a GPU: it was run with threads for streams, windows, and Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.kernels import PackedWeight, Ready, TileSchedule
from weft.kernels import triton as kernels
from weft.overlap.memory import view
from weft.overlap.plan import OverlapPlan
from weft.overlap.streams.peers import Peers
from weft.overlap.streams.state import State


@dataclass(frozen=True, eq=False)
class _Tables:
    schedule: kernels.DeviceSchedule
    places: kernels.DevicePlaces
    done: Tensor  # the address of this rank's counter at each owner that has rows
    tiles: int  # that each rank computes for this one


def _tables(plan: OverlapPlan, rank: int, peers: Peers, like: Tensor) -> _Tables:
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
    return _Tables(
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
    tables = state.table(plan, lambda: _tables(plan, state.rank, peers, x))
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
