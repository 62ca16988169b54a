"""From tensors and layouts to a plan. Pure: no device, no process group.

    tensors (spec) -> units, streams, demands (units) -> pieces (senders) -> chunks and hops (order) -> Plan

The strategies differ in what each of these steps does: their table is at the head of `spec`.

*The paper's way* to choose senders and order is kept for comparison: whole transfers, one at a time on each card, by
search. A *job* is a transfer that keeps the sender's card and the cards of all its receivers busy for some seconds (a
chain over hosts in many chunks). Jobs start in a given order, each as soon as its cards are free. For few jobs a
depth-first search with pruning finds the best senders and order; for many, a greedy order with random ties is tried
some times. `order.open_shop`, which splits and preempts, does better.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from weft.reshard.plan import Plan
from weft.reshard.senders import Piece, assign_balanced, assign_split, lower_bound, whole
from weft.reshard.spec import STRATEGIES, TensorSpec, check_options, hosts_by_rank
from weft.reshard.units import Demands, find_demands, find_units

_EPSILON = 1e-12
# Jobs up to which the depth-first search is run.
_FEW_JOBS = 8


@dataclass(frozen=True)
class CardJob:
    """`seconds` on the cards of one of `senders` (out) and of all `receivers` (in)."""

    seconds: float
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class CardSchedule:
    """Jobs in the order of their start: `jobs[k]` is an index, `senders[k]` its sender, `starts[k]` when."""

    jobs: tuple[int, ...]
    senders: tuple[int, ...]
    starts: tuple[float, ...]
    seconds: float


def paper_schedule(
    demands: Demands, pieces: Sequence[Piece], cluster: DeclaredCluster, *, search: bool
) -> CardSchedule:
    """The order of pieces with the senders that they have, as the paper makes it, or as they are given."""
    jobs = []
    for piece in pieces:
        demand = demands.demands[piece.demand]
        rate = float(min(cluster.rates[[*demand.sources, *demand.targets]]))
        jobs.append(CardJob(piece.nbytes / rate, demand.sources, demand.targets))
    senders = [piece.edges[0][0] if piece.edges else demands.demands[piece.demand].sources[0] for piece in pieces]
    if not search:
        return in_order(jobs, senders)
    return depth_first(jobs) if len(jobs) <= _FEW_JOBS else greedy(jobs, senders)


def resend(demands: Demands, pieces: Sequence[Piece], schedule: CardSchedule, *, relay: bool) -> list[Piece]:
    """The pieces with the senders that a schedule chose."""
    chosen = dict(zip(schedule.jobs, schedule.senders, strict=True))
    return [whole(piece.demand, demands.demands[piece.demand], chosen[i], relay) for i, piece in enumerate(pieces)]


def in_order(jobs: Sequence[CardJob], senders: Sequence[int]) -> CardSchedule:
    """Each job in turn, from `senders[i]`, as soon as its cards are free.

    >>> crossing = [CardJob(1.0, (h,), (d,)) for d in (2, 3) for h in (0, 1)]
    >>> in_order(crossing, [0, 1, 0, 1]).seconds
    3.0
    """
    free: dict[object, float] = {}
    starts, end = [], 0.0
    for job, sender in zip(jobs, senders, strict=True):
        cards = _cards(job, sender)
        start = max(free.get(card, 0.0) for card in cards)
        free.update(dict.fromkeys(cards, start + job.seconds))
        starts.append(start)
        end = max(end, start + job.seconds)
    order = sorted(range(len(jobs)), key=lambda i: starts[i])
    return CardSchedule(tuple(order), tuple(senders[i] for i in order), tuple(starts[i] for i in order), end)


def greedy(jobs: Sequence[CardJob], senders: Sequence[int], *, trials: int = 20, seed: int = 0) -> CardSchedule:
    """The best of some greedy orders: of the jobs whose cards are free, the one with the most left to do on
    its busiest card starts; ties are random.

    >>> crossing = [CardJob(1.0, (h,), (d,)) for d in (2, 3) for h in (0, 1)]
    >>> greedy(crossing, [0, 1, 0, 1]).seconds
    2.0
    """
    chance = random.Random(seed)
    bound = least(jobs, senders)
    best: CardSchedule | None = None
    for _ in range(trials):
        found = _greedy_once(jobs, senders, chance)
        if best is None or found.seconds < best.seconds:
            best = found
        if best.seconds <= bound + _EPSILON:
            break
    assert best is not None
    return best


def _greedy_once(jobs: Sequence[CardJob], senders: Sequence[int], chance: random.Random) -> CardSchedule:
    left: dict[object, float] = {}
    for job, sender in zip(jobs, senders, strict=True):
        for card in _cards(job, sender):
            left[card] = left.get(card, 0.0) + job.seconds
    waiting = chance.sample(range(len(jobs)), len(jobs))
    free: dict[object, float] = {}
    order, starts, now = [], [], 0.0
    while waiting:
        waiting.sort(key=lambda i: -max(left[card] for card in _cards(jobs[i], senders[i])))
        for i in tuple(waiting):
            cards = _cards(jobs[i], senders[i])
            if all(free.get(card, 0.0) <= now + _EPSILON for card in cards):
                free.update(dict.fromkeys(cards, now + jobs[i].seconds))
                for card in cards:
                    left[card] -= jobs[i].seconds
                waiting.remove(i)
                order.append(i)
                starts.append(now)
        now = min((time for time in free.values() if time > now + _EPSILON), default=now)
    end = max((start + jobs[i].seconds for start, i in zip(starts, order, strict=True)), default=0.0)
    return CardSchedule(tuple(order), tuple(senders[i] for i in order), tuple(starts), end)


def least(jobs: Sequence[CardJob], senders: Sequence[int]) -> float:
    """The busiest card: no order of these senders is shorter."""
    busy: dict[object, float] = {}
    for job, sender in zip(jobs, senders, strict=True):
        for card in _cards(job, sender):
            busy[card] = busy.get(card, 0.0) + job.seconds
    return max(busy.values(), default=0.0)


def depth_first(jobs: Sequence[CardJob], *, most_steps: int = 20_000) -> CardSchedule:
    """The best senders and order, if the search ends within `most_steps`; the best one seen otherwise."""
    return _Search(jobs, most_steps).run()


class _Search:
    """Branch and bound over (next job, its sender); a branch ends where its busiest card is no better."""

    def __init__(self, jobs: Sequence[CardJob], most_steps: int) -> None:
        self.jobs = jobs
        self.steps = most_steps
        self.best: CardSchedule | None = None

    def run(self) -> CardSchedule:
        self._extend([], [], {}, 0.0)
        assert self.best is not None
        return self.best

    def _extend(self, order: list[int], senders: list[int], free: dict[object, float], end: float) -> None:
        self.steps -= 1
        if len(order) == len(self.jobs):
            chosen = [replace(self.jobs[i], senders=(s,)) for i, s in zip(order, senders, strict=True)]
            found = in_order(chosen, senders)
            starts = sorted(zip(found.starts, (order[k] for k in found.jobs), found.senders, strict=True))
            times, jobs, hosts = zip(*starts, strict=True) if starts else ((), (), ())
            self.best = CardSchedule(jobs, hosts, times, found.seconds)
            return
        tried: set[CardJob] = set()
        for i, job in enumerate(self.jobs):
            if i in order or job in tried:  # equal jobs are tried once
                continue
            tried.add(job)
            for sender in job.senders:
                self._try(i, job, sender, order, senders, free, end)

    def _try(
        self,
        i: int,
        job: CardJob,
        sender: int,
        order: list[int],
        senders: list[int],
        free: dict[object, float],
        end: float,
    ) -> None:
        cards = _cards(job, sender)
        finish = max(free.get(card, 0.0) for card in cards) + job.seconds
        end = max(end, finish)
        promising = self.best is None or (self.steps > 0 and self._can_win(i, order, cards, finish, free, end))
        if promising:
            self._extend([*order, i], [*senders, sender], {**free, **dict.fromkeys(cards, finish)}, end)

    def _can_win(
        self, i: int, order: list[int], cards: list[object], finish: float, free: dict[object, float], end: float
    ) -> bool:
        """Whether the rest could still end before the best one: every receiver must take what is left for it."""
        assert self.best is not None
        rest: dict[object, float] = {}
        for k, job in enumerate(self.jobs):
            if k != i and k not in order:
                for host in job.receivers:
                    rest[("in", host)] = rest.get(("in", host), 0.0) + job.seconds
        after = {**free, **dict.fromkeys(cards, finish)}
        bound = max((after.get(card, 0.0) + seconds for card, seconds in rest.items()), default=0.0)
        return max(end, bound) < self.best.seconds - _EPSILON


def _cards(job: CardJob, sender: int) -> list[object]:
    return [("out", sender), *(("in", host) for host in job.receivers)]


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
    chunk_bytes: the largest message; by default chosen from the size of the transfer

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
