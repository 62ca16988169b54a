"""From tensors and layouts to a plan. Pure: no device, no process group.

    tensors (spec) -> units, streams, demands (units) -> pieces (senders) -> chunks and hops (order; paper) -> Plan

The strategies differ in what each of these steps does: their table is at the head of `spec`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from weft.layout import DeclaredCluster, Layout
from weft.reshard.order import (
    Chunks,
    Cuts,
    Hops,
    Seats,
    cut_in_turn,
    cut_open_shop,
    sort_hops,
    split_evenly,
    to_chunks,
    to_hops,
)
from weft.reshard.paper import paper_schedule, resend
from weft.reshard.plan import Plan
from weft.reshard.senders import Piece, assign_balanced, assign_split, lower_bound
from weft.reshard.spec import STRATEGIES, TensorSpec, check_options, hosts_by_rank
from weft.reshard.units import Demands, find_demands, find_units

SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20
# A chunk is so small a part of what the busiest card carries. Where hosts pass chunks on, each waits for its
# first one: a chain over four hosts then ends 5 % late. Half the size would end sooner on paper, but each message
# costs a rank about as much time as 30 kB on the wire, and twice as many cost more than they gain.
_CHUNKS_PER_CARD, _CHUNKS_PER_RELAY = 32, 64


def plan_reshard(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    src: Layout,
    dst: Layout,
    cluster: DeclaredCluster | None = None,
    strategy: str = "optimal",
    chunk_bytes: int | None = None,
    dst_dtype: torch.dtype | None = None,
    name: str = "tensor",
) -> Plan:
    """The plan that moves one tensor from a mesh and layout to another.

    cluster: the cards' rates; without it all are alike (10 Gbit/s), which gives the same order
    chunk_bytes: the largest message; chosen from the size of the transfer unless told

    >>> from weft.layout import Mesh, Replicate, Shard
    >>> a, b = Mesh.grid(2, 1), Mesh.grid(1, 2, first_rank=2, first_host=2)
    >>> src, dst = Layout(a, [Shard(0), Replicate()]), Layout(b, [Replicate(), Shard(0)])
    >>> plan = plan_reshard((256, 256), torch.float32, src=src, dst=dst)
    >>> plan.bytes_by_card[2]
    Traffic(out=0, into=262144)
    """
    spec = TensorSpec(name, tuple(int(size) for size in shape), dtype, src, dst, dst_dtype or dtype)
    return plan_tensors([spec], cluster=cluster, strategy=strategy, chunk_bytes=chunk_bytes)


def plan_tensors(
    tensors: Sequence[TensorSpec],
    *,
    cluster: DeclaredCluster | None = None,
    strategy: str = "optimal",
    chunk_bytes: int | None = None,
) -> Plan:
    """The plan that moves many tensors at once; see `plan_reshard`."""
    check_options(strategy, chunk_bytes)
    how = STRATEGIES[strategy]
    host_of = hosts_by_rank(tensors)
    cluster = cluster or DeclaredCluster.uniform(max(host_of.values(), default=0) + 1, gbps=10.0)
    if max(host_of.values(), default=0) >= cluster.hosts:
        raise ValueError(
            f"a mesh names host {max(host_of.values())}, but the cluster has {cluster.hosts} hosts, numbered from "
            "0; give a cluster with a rate for each host"
        )
    units, streams = find_units(tensors, each_taker=how.each_taker)
    demands = find_demands(streams, host_of, merge=how.senders == "split")
    if how.senders == "split":
        pieces, bound = assign_split(demands.demands, rates=cluster.rates)
    else:
        pieces = assign_balanced(demands.demands, relay=how.relay, rates=cluster.rates)
        bound = lower_bound(tensors, cluster)
    chunk = chunk_bytes or _chunk_bytes(bound, cluster, relayed=any(_is_relayed(piece) for piece in pieces))
    items = [demands.demands[piece.demand].itemsize for piece in pieces]
    if how.order == "open_shop":
        cuts = cut_open_shop(pieces, items=items, rates=cluster.rates, chunk=chunk, seconds=bound)
    else:
        schedule = paper_schedule(demands, pieces, cluster, search=how.order == "search")
        pieces = resend(demands, pieces, schedule, relay=how.relay)
        cuts = cut_in_turn(pieces, schedule.jobs, items=items, chunk=chunk)
    chunks, hops = _to_ranks(cuts, pieces, demands, Seats(streams, demands, host_of), how.rotate, chunk)
    return Plan(tuple(tensors), cluster, strategy, chunk, bound, units, streams, chunks, hops)


def _chunk_bytes(bound: float, cluster: DeclaredCluster, *, relayed: bool) -> int:
    wanted = bound * float(cluster.rates.max()) / (_CHUNKS_PER_RELAY if relayed else _CHUNKS_PER_CARD)
    return int(min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 1 << max(0, round(np.log2(max(wanted, 1)))))))


def _is_relayed(piece: Piece) -> bool:
    return not {a for a, _ in piece.edges}.isdisjoint(b for _, b in piece.edges)


def _to_ranks(
    cuts: Cuts, pieces: Sequence[Piece], demands: Demands, seats: Seats, rotate: bool, chunk: int
) -> tuple[Chunks, Hops]:
    """Chunks between hosts and chunks inside a host, in one order."""
    chunks, piece_of, cut = to_chunks(cuts, pieces, demands, seats.streams)
    turn = cut if rotate else np.zeros(len(chunks), np.int64)
    hops = to_hops(chunks, piece_of, pieces, demands, seats, turn)
    shared, own_hops, share_time = _share(demands, seats, chunk, float(cuts.time.max(initial=0.0)))
    time = np.concatenate([cuts.time[cut], share_time])
    order = np.argsort(time, kind="stable")
    new_place = np.empty(len(order), np.int64)
    new_place[order] = np.arange(len(order))
    columns = [np.concatenate(pair)[order] for pair in zip(chunks.columns, shared.columns, strict=True)]
    first = (new_place[hops.chunk], hops.sender, hops.receiver, hops.adds)
    others = (new_place[own_hops.chunk + len(chunks)], own_hops.sender, own_hops.receiver, own_hops.adds)
    return Chunks(*columns), sort_hops(first, others)


def _share(demands: Demands, seats: Seats, chunk: int, end: float) -> tuple[Chunks, Hops, NDArray[np.float64]]:
    """What a rank gives to others on its host, spread over the time that the cards are busy."""
    rows, times = [], []
    for stream, host in demands.shares.tolist():
        size, item = int(seats.streams.nbytes[stream]), int(seats.streams.itemsize[stream])
        spans = split_evenly(0, size, item=item, most=chunk)
        rows += [(stream, a, b, host) for a, b in spans]
        times += [end * k / len(spans) for k in range(len(spans))]
    table = np.array(rows, np.int64).reshape(-1, 4)
    rank = seats.holder(table[:, 0], table[:, 3])
    hops = Hops(np.arange(len(rows)), rank, rank, np.zeros(len(rows), bool))
    return Chunks(table[:, 0], table[:, 1], table[:, 2]), hops, np.array(times, np.float64)
