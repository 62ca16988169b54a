"""Matmuls whose input travels: where each row of x comes from, and in which order tiles start.

`lower` turns a plan into the program of one rank. A rank copies its own rows to its window in chunks, where the ranks
of its host read them in place, and sends them to one rank of every other host, which receives them into its window.
Each chunk that has arrived raises the counters of the tile rows that read it, on every rank that does; a tile starts
when the counter of its row is full. A chunk and a tile may have any sizes.

The gather that is the backward pass of all-to-all is the same, but each rank sends different rows to each other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise

from weft.kernels.tiles import TileSchedule, Tiling
from weft.overlap.blocks import Counts, cut_points, row_bounds
from weft.overlap.plan import Op, OverlapPlan


class Store(str, Enum):
    """Where rows of x are read: the rank's own x, the outbox of a rank of its host, or the inbox of one."""

    X = "x"
    OUTBOX = "outbox"
    INBOX = "inbox"


@dataclass(frozen=True)
class RowSource:
    """`rows` rows of the gathered x from row `start` of a store of `rank` on."""

    store: Store
    rank: int
    start: int
    rows: int


@dataclass(frozen=True)
class RowArrival:
    """Rows [m0, m1) of the gathered x of `rank` will be there."""

    rank: int
    m0: int
    m1: int


@dataclass(frozen=True)
class Offer:
    """Copy rows [start, end) of x to the outbox, and tell who reads them."""

    start: int
    end: int
    tell: tuple[RowArrival, ...]


@dataclass(frozen=True)
class SendRows:
    """Send rows [start, end) of x to `peer`."""

    peer: int
    tag: int
    start: int
    end: int


@dataclass(frozen=True)
class ExpectRows:
    """Receive rows [m0, m1) of the gathered x from `peer`, and tell who reads them."""

    peer: int
    tag: int
    m0: int
    m1: int
    tell: tuple[RowArrival, ...]


@dataclass(frozen=True)
class Incoming:
    """The program of one rank for an op whose input travels; x has `x_rows` rows here and tiling.m in all."""

    rank: int
    tiling: Tiling
    x_rows: int
    offers: tuple[Offer, ...]
    sends: tuple[SendRows, ...]
    expects: tuple[ExpectRows, ...]
    sources: tuple[RowSource, ...]
    tile_rows: tuple[int, ...]  # in the order of computing
    needs: tuple[int, ...]  # chunks that each tile row waits for
    arrivals: tuple[RowArrival, ...]  # of this rank: the chunks that it waits for

    def schedule(self) -> TileSchedule:
        """The order of the tiles: tile rows as their input arrives."""
        cols = self.tiling.cols
        return TileSchedule(self.tiling, order=[row * cols + col for row in self.tile_rows for col in range(cols)])

    def touched(self, arrival: RowArrival) -> range:
        """The tile rows, hence counters, that read the rows of `arrival`."""
        return _tile_rows(self.tiling, arrival)


@lru_cache(maxsize=512)
def lower(plan: OverlapPlan, rank: int, counts: Counts | None = None) -> Incoming:
    """The program of `rank`; the gather back needs to know how many rows went where."""
    assert (counts is not None) == (plan.op is Op.GATHER_BACK), plan.op
    gather = _Gather(plan, counts)
    m = plan.m if counts is None else sum(counts[rank])
    tiling = Tiling(m, plan.n, plan.tile_m, plan.tile_n)
    tile_rows, needs = _tile_order(gather, rank, tiling)
    return Incoming(
        rank=rank,
        tiling=tiling,
        x_rows=gather.x_rows(rank),
        offers=tuple(_offers(gather, rank)),
        sends=tuple(_sends(gather, rank)),
        expects=tuple(_expects(gather, rank)),
        sources=_sources(gather, rank),
        tile_rows=tile_rows,
        needs=needs,
        arrivals=tuple(c.arrival for s in range(plan.size) if s != rank for c in gather.chunks(s, rank)),
    )


@dataclass(frozen=True)
class _Chunk:
    """Rows of the x of `source`, and where they go in the gathered x of `reader`."""

    number: int
    source: int
    start: int
    end: int
    reader: int
    m0: int

    @property
    def arrival(self) -> RowArrival:
        return RowArrival(self.reader, self.m0, self.m0 + self.end - self.start)


class _Gather:
    """Who reads which rows of whom: all of them (all-gather), or those that it once sent there (gather back)."""

    def __init__(self, plan: OverlapPlan, counts: Counts | None) -> None:
        self.plan = plan
        self.counts = counts

    def rows_of(self, source: int, reader: int) -> tuple[int, int, int]:
        """(start, end) in the x of `source`, and where that starts in the gathered x of `reader`."""
        if self.counts is None:
            bounds = self.plan.shard_bounds
            return 0, bounds[source + 1] - bounds[source], bounds[source]
        start = sum(self.counts[r][source] for r in range(reader))
        return start, start + self.counts[reader][source], row_bounds(self.counts[reader])[source]

    def chunks(self, source: int, reader: int) -> Iterator[_Chunk]:
        start, end, m0 = self.rows_of(source, reader)
        for number, (a, b) in enumerate(pairwise(cut_points(end - start, self.plan.weights))):
            yield _Chunk(number, source, start + a, start + b, reader, m0 + a)

    def x_rows(self, rank: int) -> int:
        if self.counts is None:
            return self.plan.shard_bounds[rank + 1] - self.plan.shard_bounds[rank]
        return sum(row[rank] for row in self.counts)

    def receivers(self, source: int, host: int) -> tuple[int, ...]:
        """Who of `host` receives rows of `source`: one for all, or each its own."""
        topology = self.plan.topology
        return (topology.gateway(source, host),) if self.counts is None else topology.ranks_of(host)

    def readers(self, receiver: int) -> tuple[int, ...]:
        """Who reads rows where `receiver` has them."""
        return self.plan.topology.local(receiver) if self.counts is None else (receiver,)


def _offers(gather: _Gather, rank: int) -> Iterator[Offer]:
    peers = [r for r in gather.plan.topology.local(rank) if r != rank]
    if gather.counts is not None:
        chunks = sorted((c for r in peers for c in gather.chunks(rank, r)), key=lambda c: c.number)
        yield from (Offer(c.start, c.end, (c.arrival,)) for c in chunks)
    elif peers:
        for same in zip(*(gather.chunks(rank, r) for r in peers), strict=True):
            yield Offer(same[0].start, same[0].end, tuple(c.arrival for c in same))


def _sends(gather: _Gather, rank: int) -> Iterator[SendRows]:
    """First chunks first, and everybody starts with another host."""
    topology = gather.plan.topology
    found = [
        (chunk, place)
        for place, host in enumerate(topology.other_hosts(topology.hosts[rank]))
        for receiver in gather.receivers(rank, host)
        for chunk in gather.chunks(rank, receiver)
    ]
    for chunk, _ in sorted(found, key=lambda pair: (pair[0].number, pair[1])):
        yield SendRows(chunk.reader, chunk.number + 1, chunk.start, chunk.end)


def _expects(gather: _Gather, rank: int) -> Iterator[ExpectRows]:
    topology = gather.plan.topology
    found = [
        chunk
        for host in topology.other_hosts(topology.hosts[rank])
        for source in topology.ranks_of(host)
        if rank in gather.receivers(source, topology.hosts[rank])
        for chunk in gather.chunks(source, rank)
    ]
    for chunk in sorted(found, key=lambda c: c.number):
        there = chunk.arrival
        tell = tuple(RowArrival(r, there.m0, there.m1) for r in gather.readers(rank))
        yield ExpectRows(chunk.source, chunk.number + 1, there.m0, there.m1, tell)


def _sources(gather: _Gather, rank: int) -> tuple[RowSource, ...]:
    topology = gather.plan.topology
    found = []
    for source in range(gather.plan.size):
        start, end, m0 = gather.rows_of(source, rank)
        if source == rank:
            found.append(RowSource(Store.X, rank, start, end - start))
        elif source in topology.local(rank):
            found.append(RowSource(Store.OUTBOX, source, start, end - start))
        else:
            holder = rank if gather.counts is not None else topology.gateway(source, topology.hosts[rank])
            found.append(RowSource(Store.INBOX, holder, m0, end - start))
    return tuple(s for s in found if s.rows)


def _tile_order(gather: _Gather, rank: int, tiling: Tiling) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tile rows by the arrival of the last chunk that each reads, and how many chunks that are."""
    topology = gather.plan.topology
    hosts = (topology.hosts[rank], *topology.other_hosts(topology.hosts[rank]))
    key = [(0, 0, 0)] * tiling.rows
    needs = [0] * tiling.rows
    for place, host in enumerate(hosts):
        for source in topology.ranks_of(host):
            for chunk in gather.chunks(source, rank) if source != rank else ():
                for row in _tile_rows(tiling, chunk.arrival):
                    # What a window brings is there before anything that a wire does.
                    key[row] = max(key[row], (1 + (place > 0), chunk.number, place))
                    needs[row] += 1
    return tuple(sorted(range(tiling.rows), key=lambda row: (key[row], row))), tuple(needs)


def _tile_rows(tiling: Tiling, arrival: RowArrival) -> range:
    return range(arrival.m0 // tiling.tile_m, -(-arrival.m1 // tiling.tile_m))
