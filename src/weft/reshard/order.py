"""In which order bytes leave: pieces cut for the wire, put in one order in which no card waits, given to ranks.

    pieces (demands, hosts) -> cuts with a planned time -> chunks (streams) -> hops (ranks)

All ranks take the chunks in the same order; so with any number of buffers nobody waits in a circle: the first
chunk that is not through yet can always go on.

The order is an open shop with preemption, solved exactly. loads[i, j] is the time that sender i needs for receiver j,
in whole quanta. No order can be shorter than the largest sum of a row or a column, and one of exactly that length
exists (Birkhoff and von Neumann; Gonzalez and Sahni): fill the matrix up until all rows and columns have that sum; then
there is a way to pair off all senders and receivers; let the pairs send until one of them is done, and repeat. Among
the many ways to pair off, those with large entries are taken first (a threshold that is halved when there is no such
way), so that few and long phases come out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from weft.layout import Ints
from weft.reshard.senders import Edge, Piece, Rates
from weft.reshard.units import Demands, Ranks, Streams

# How many messages a rank has under way, at most: the executor posts so many ahead, and the simulator counts on it.
SENDS_AHEAD = 8
RECEIVES_AHEAD = 16

# A phase of the open shop is a whole number of these parts of a chunk: shorter messages cost more than they
# gain.
_PARTS = 8
# What a pair of hosts sends before the next pair's turn, in chunks.
_CHUNKS_PER_TURN = 1
# Chunks begin at multiples of so many elements of their piece.
_ALIGN = 64


@dataclass(frozen=True)
class Chunks:
    """c chunks in the order in which they go: bytes [start, stop) of a stream."""

    stream: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def columns(self) -> tuple[Ints, Ints, Ints]:
        """(stream, start, stop)."""
        return self.stream, self.start, self.stop


@dataclass(frozen=True)
class Hops:
    """h transfers between ranks, sorted by chunk, each after the one that brings the bytes to its sender.

    adds: the receiver holds a term, and reduces it with what arrives
    A hop from a rank to itself crosses nothing: the rank shares the chunk with others on its host.
    """

    chunk: Ints
    sender: Ints
    receiver: Ints
    adds: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.chunk)


@dataclass(frozen=True)
class Cuts:
    """Parts of pieces with the time, in seconds, at which each is planned to leave."""

    piece: Ints
    start: Ints
    stop: Ints
    time: NDArray[np.float64]


def cut_in_turn(pieces: Sequence[Piece], order: Sequence[int], *, items: Sequence[int], chunk: int) -> Cuts:
    """One piece after the other, in chunks of at most `chunk` bytes; `items[i]` is the element of piece i."""
    rows = [
        (index, a, b, float(turn))
        for turn, index in enumerate(order)
        for a, b in split_evenly(pieces[index].start, pieces[index].stop, item=items[index], most=chunk)
    ]
    return _cuts(rows)


def cut_open_shop(pieces: Sequence[Piece], *, items: Sequence[int], rates: Rates, chunk: int, seconds: float) -> Cuts:
    """The order of an open shop with preemption for pieces with one transfer.

    Pieces that are passed on from host to host are spread evenly over the whole time instead: then all hosts
    on the way are busy as soon as the first chunk is there.
    """
    rows: list[tuple[int, int, int, float]] = []
    queues: dict[Edge, list[int]] = {}
    for index, piece in enumerate(pieces):
        if len(piece.edges) == 1:
            queues.setdefault(piece.edges[0], []).append(index)
        else:
            spans = split_evenly(piece.start, piece.stop, item=items[index], most=chunk)
            rows += [(index, a, b, seconds * k / len(spans)) for k, (a, b) in enumerate(spans)]
    quantum = chunk / _PARTS / float(rates.max(initial=1.0))
    for pair, turns in _turns(pieces, queues, rates, quantum).items():
        speed = float(min(rates[list(pair)]))
        rows += _follow([(pieces[i], i, items[i]) for i in queues[pair]], turns, speed, quantum, chunk)
    return _cuts(rows)


def _cuts(rows: Sequence[tuple[int, int, int, float]]) -> Cuts:
    rows = sorted(rows, key=lambda row: (row[3], row[0], row[1]))
    columns = [np.array([row[k] for row in rows], np.int64) for k in range(3)]
    return Cuts(columns[0], columns[1], columns[2], np.array([row[3] for row in rows], np.float64))


def split_evenly(start: int, stop: int, *, item: int, most: int) -> list[tuple[int, int]]:
    """[start, stop) in equal parts of at most about `most` bytes, at even places.

    >>> split_evenly(0, 1000, item=1, most=400)
    [(0, 320), (320, 640), (640, 1000)]
    """
    count, step = -(-(stop - start) // most), item * _ALIGN
    cuts = [start + k * (stop - start) // (count * step) * step for k in range(count)] + [stop]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _turns(
    pieces: Sequence[Piece], queues: Mapping[Edge, Sequence[int]], rates: Rates, quantum: float
) -> dict[Edge, list[tuple[float, float]]]:
    """For each pair of hosts the (start, length) of its phases, in quanta; neighbours are joined.

    The phases are gone through in several rounds, a part of each at a time. The sum is the same, and hosts
    that fall behind the plan meet at most one round's worth of each other's phases.
    """
    senders, receivers = (sorted({pair[k] for pair in queues}) for k in (0, 1))
    row, column = ({host: i for i, host in enumerate(hosts)} for hosts in (senders, receivers))
    loads = np.zeros((len(senders), len(receivers)), np.int64)
    for (a, b), queue in queues.items():
        needed = sum(pieces[i].nbytes for i in queue) / min(rates[a], rates[b])
        loads[row[a], column[b]] = max(1, int(np.ceil(needed / quantum - 1e-6)))
    phases = open_shop(loads)
    total = max(int(loads.sum(axis=axis).max(initial=0)) for axis in (0, 1))
    rounds = max(1, round(total / (_CHUNKS_PER_TURN * _PARTS * max(1, len(phases)))))
    turns: dict[Edge, list[tuple[float, float]]] = {pair: [] for pair in queues}
    for nth in range(rounds):
        for phase in phases:
            start, length = (nth * total + phase.start) / rounds, phase.length / rounds
            for i, j in phase.pairs:
                mine = turns[senders[i], receivers[j]]
                if mine and sum(mine[-1]) > start - 1e-6:
                    mine[-1] = (mine[-1][0], start + length - mine[-1][0])
                else:
                    mine.append((start, length))
    return turns


def _follow(
    queue: Sequence[tuple[Piece, int, int]],
    turns: Sequence[tuple[float, float]],
    speed: float,
    quantum: float,
    chunk: int,
) -> list[tuple[int, int, int, float]]:
    """Cuts the pieces of one pair of hosts where its phases end: rows of (piece, start, stop, time)."""
    starts = [0.0, *accumulate(length * quantum * speed for _, length in turns[:-1])]  # in bytes of the queue
    rows = []
    offset = 0
    for piece, index, item in queue:
        step = item * _ALIGN
        inner = {piece.start + round((start - offset) / step) * step for start in starts}
        cuts = [piece.start, *sorted(cut for cut in inner if piece.start < cut < piece.stop), piece.stop]
        for low, high in pairwise(cuts):
            for a, b in split_evenly(low, high, item=item, most=chunk):
                done = offset + a - piece.start
                phase = bisect_right(starts, done + step / 2) - 1
                time = turns[phase][0] * quantum + max(0.0, done - starts[phase]) / speed
                rows.append((index, a, b, time))
        offset += piece.nbytes
    return rows


@dataclass(frozen=True)
class Phase:
    """From `start` on, for `length` quanta, each pair (row, column) of `pairs` sends."""

    start: int
    length: int
    pairs: tuple[tuple[int, int], ...]


def open_shop(loads: Ints) -> list[Phase]:
    """The phases of a matrix [senders, receivers] of whole numbers.

    >>> open_shop(np.array([[1, 1], [1, 1]]))
    [Phase(start=0, length=1, pairs=((0, 0), (1, 1))), Phase(start=1, length=1, pairs=((0, 1), (1, 0)))]
    """
    rows, columns = loads.shape
    left = _fill_up(loads)
    total = int(left[0].sum()) if len(left) else 0
    matching = _Matching(len(left))
    phases: list[Phase] = []
    now, threshold = 0, 1 << (int(left.max(initial=1)).bit_length() - 1)
    matching.allow(left >= threshold)
    while now < total:
        if not matching.complete():
            threshold //= 2
            matching.allow(left >= threshold)
            continue
        columns_of = matching.column
        entries = left[np.arange(len(left)), columns_of]
        length = int(entries.min())
        pairs = tuple((i, j) for i, j in enumerate(columns_of[:rows]) if j < columns and loads[i, j])
        phases.append(Phase(now, length, pairs))
        left[np.arange(len(left)), columns_of] -= length
        now += length
        for row in np.nonzero(entries - length < threshold)[0].tolist():
            matching.forbid(row)
    return phases


def _fill_up(loads: Ints) -> Ints:
    """[r + c, r + c] with `loads` in the corner and all rows and columns of the same sum."""
    out, into = loads.sum(axis=1), loads.sum(axis=0)
    total = max(out.max(initial=0), into.max(initial=0))
    return np.block([[loads, np.diag(total - out)], [np.diag(total - into), loads.T]]).astype(np.int64)


class _Matching:
    """A matching of rows and columns that is repaired, not made anew, when entries come and go.

    Sets of columns are the bits of Python integers: a breadth-first search then takes few steps.
    """

    def __init__(self, size: int) -> None:
        self.column = [-1] * size  # of each row
        self._row = [-1] * size  # of each column
        self._allowed = [0] * size  # the columns that each row may take
        self._free = (1 << size) - 1  # the columns that are not taken

    def allow(self, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Sets which entries may be taken; those that are taken stay so."""
        packed = np.packbits(allowed, axis=1, bitorder="little")
        self._allowed = [int.from_bytes(row.tobytes(), "little") for row in packed]

    def forbid(self, row: int) -> None:
        """Takes the entry of a row out of the matching, and out of those that may be taken."""
        column = self.column[row]
        self._allowed[row] &= ~(1 << column)
        self.column[row] = self._row[column] = -1
        self._free |= 1 << column

    def complete(self) -> bool:
        """Matches every row if that can be done."""
        return all(self.column[row] >= 0 or self._augment(row) for row in range(len(self.column)))

    def _augment(self, start: int) -> bool:
        came_from: dict[int, int] = {}  # column -> row that reached it
        unseen = (1 << len(self.column)) - 1
        rows = [start]
        for row in rows:
            reached = self._allowed[row] & unseen
            end = reached & self._free
            if end:
                self._flip((end & -end).bit_length() - 1, row, came_from)
                return True
            unseen &= ~reached
            while reached:
                column = (reached & -reached).bit_length() - 1
                reached &= reached - 1
                came_from[column] = row
                rows.append(self._row[column])
        return False

    def _flip(self, column: int, row: int, came_from: dict[int, int]) -> None:
        self._free &= ~(1 << column)
        while True:
            before = self.column[row]
            self.column[row], self._row[column] = column, row
            if before < 0:
                return
            column, row = before, came_from[before]


def to_chunks(cuts: Cuts, pieces: Sequence[Piece], demands: Demands, streams: Streams) -> tuple[Chunks, Ints, Ints]:
    """Cuts at the borders of streams too: the chunks, and for each its piece and its cut."""
    sizes = np.array([demand.nbytes for demand in demands.demands], np.int64)
    base = np.cumsum(sizes) - sizes  # demands end to end
    (crossing,) = np.nonzero((demands.of_stream >= 0) & (streams.nbytes > 0))
    place = base[demands.of_stream[crossing]] + demands.start[crossing]
    order = np.argsort(place, kind="stable")
    crossing, place = crossing[order], place[order]
    demand = np.array([piece.demand for piece in pieces], np.int64)[cuts.piece]
    start, stop = base[demand] + cuts.start, base[demand] + cuts.stop
    first = np.searchsorted(place, start, side="right") - 1
    count = np.searchsorted(place, stop, side="left") - first
    cut = np.repeat(np.arange(len(start)), count)
    within = np.arange(len(cut)) - np.repeat(np.cumsum(count) - count, count)
    which = first[cut] + within
    ends = place[which] + streams.nbytes[crossing[which]]
    low, high = np.maximum(start[cut], place[which]), np.minimum(stop[cut], ends)
    chunks = Chunks(crossing[which], low - place[which], high - place[which])
    return chunks, cuts.piece[cut], cut


def to_hops(
    chunks: Chunks, piece_of: Ints, pieces: Sequence[Piece], demands: Demands, seats: Seats, turn: Ints
) -> Hops:
    """Gives the transfers of each chunk to ranks; `turn` rotates which of a host's ranks receives."""
    counts = np.array([len(piece.edges) for piece in pieces], np.int64)
    edges = np.array([edge for piece in pieces for edge in piece.edges], np.int64).reshape(-1, 2)
    from_source = np.array(
        [a in demands.demands[piece.demand].sources for piece in pieces for a, _ in piece.edges], bool
    )
    count = counts[piece_of]
    chunk = np.repeat(np.arange(len(chunks)), count)
    nth = np.arange(len(chunk)) - np.repeat(np.cumsum(count) - count, count)
    edge = (np.cumsum(counts) - counts)[piece_of[chunk]] + nth
    stream = chunks.stream[chunk]
    a, b = edges[edge, 0], edges[edge, 1]
    head_a, head_b = (seats.taker(stream, host, turn[chunk]) for host in (a, b))
    sender = np.where(from_source[edge], seats.holder(stream, a), head_a)
    tree = (chunk, sender, head_b, np.zeros(len(chunk), bool))
    return sort_hops(tree, _chain_hops(chunks, demands.chains, seats))


def _chain_hops(chunks: Chunks, chains: Sequence[Ranks], seats: Seats) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """The transfers that reduce terms, for the chunks that have more than one."""
    chain_of = seats.streams.holders[chunks.stream]
    rows = [
        (chunk, a, b)
        for holder in np.unique(chain_of).tolist()
        if chains[holder]
        for chunk in np.nonzero(chain_of == holder)[0].tolist()
        for a, b in zip(chains[holder][:-1], chains[holder][1:], strict=True)
    ]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2], np.ones(len(rows), bool)


def sort_hops(*parts: tuple[Ints, Ints, Ints, NDArray[np.bool_]]) -> Hops:
    """One table of several, by chunk; hops that reduce come first, others stay in their order."""
    chunk, sender, receiver, adds = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((np.arange(len(chunk)), ~adds, chunk))
    return Hops(chunk[order], sender[order], receiver[order], adds[order].astype(bool))


class Seats:
    """Which rank of a host acts for a stream there: holders and takers take turns by stream."""

    def __init__(self, streams: Streams, demands: Demands, host_of: Mapping[int, int]) -> None:
        self.streams = streams
        sources = [chain[-1:] or terms[0] for chain, terms in zip(demands.chains, streams.holder_sets, strict=True)]
        self._holders = _Table(sources, host_of)
        self._takers = _Table(streams.taker_sets, host_of)

    def holder(self, stream: Ints, host: Ints) -> Ints:
        """The rank of `host` that sends a stream; -1 where none holds it."""
        return self._holders.pick(self.streams.holders[stream], host, stream)

    def taker(self, stream: Ints, host: Ints, turn: Ints) -> Ints:
        """The rank of `host` that receives it for all there; -1 where none needs it."""
        return self._takers.pick(self.streams.takers[stream], host, stream + turn)


class _Table:
    """The ranks of each set on each host, in rows of equal width."""

    def __init__(self, sets: Sequence[Ranks], host_of: Mapping[int, int]) -> None:
        self._hosts = max(host_of.values(), default=0) + 1
        lists: dict[int, list[int]] = {}
        for i, ranks in enumerate(sets):
            for rank in ranks:
                lists.setdefault(i * self._hosts + host_of[rank], []).append(rank)
        width = max(map(len, lists.values()), default=1)
        self._keys = np.array(sorted(lists), np.int64)
        self._count = np.array([len(lists[key]) for key in sorted(lists)], np.int64)
        self._ranks = np.array([(lists[key] * width)[:width] for key in sorted(lists)], np.int64).reshape(-1, width)

    def pick(self, number: Ints, host: Ints, turn: Ints) -> Ints:
        if len(self._keys) == 0:
            return np.full(len(number), -1, np.int64)
        key = number * self._hosts + host
        row = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[row] == key, self._ranks[row, turn % self._count[row]], -1)
