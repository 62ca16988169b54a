"""Who sends what: demands become pieces, each with a tree of transfers between hosts.

    balanced   the host that has the least to send so far sends it, large demands first
    split      a demand is divided among all hosts that hold it, and hosts that received it pass it on,
               so that the busiest card is the least busy that it can be: exactly, by maximum flow

A host that needs a demand receives it once, whoever sends it; so what enters a card is given, and only what
leaves a card is chosen:

    demand --> hosts that may send it --> cards: out of each host, at most T x rate - what it must send anyway

For a given time T this is a flow problem: can all demands be sent? If not, the minimum cut is a set of
demands and the only hosts that can send them, and it says how large T must be for these at least. Starting
from a bound and raising T to what the cut demands ends at the smallest T after a few flows (Newton's method
on a piecewise linear function), where halving an interval would need dozens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.layout import DeclaredCluster, Ints
from weft.reshard.spec import TensorSpec, hosts_by_rank
from weft.reshard.units import Demand, find_demands, find_units

Edge = tuple[int, int]
Rates = NDArray[np.float64]

# Cuts of a demand lie at multiples of a part in so many of it, at most: even cuts copy faster.
_GRAINS = 4096


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a demand, and the transfers that bring them to all of its targets.

    edges: (from host, to host), each after the one that brings the bytes to its sender
    """

    demand: int
    start: int
    stop: int
    edges: tuple[Edge, ...]

    @property
    def nbytes(self) -> int:
        """The size."""
        return self.stop - self.start


def assign_balanced(demands: Sequence[Demand], *, relay: bool, rates: Rates) -> list[Piece]:
    """Every demand from the source that has the least to send, the largest demand first.

    `relay` passes it on from host to host, else the source sends to each.
    """
    busy = np.zeros(len(rates))
    pieces: dict[int, Piece] = {}
    for i in sorted(range(len(demands)), key=lambda i: -demands[i].nbytes):
        sources = np.array(demands[i].sources)
        pieces[i] = whole(i, demands[i], int(sources[np.argmin(busy[sources])]), relay)
        for a, _ in (*demands[i].hops, *pieces[i].edges):
            busy[a] += demands[i].nbytes / rates[a]
    return [pieces[i] for i in range(len(demands))]


def whole(index: int, demand: Demand, source: int, relay: bool) -> Piece:
    """A demand in one piece: `source` sends it to the first target, which passes it on, or to each of them."""
    count = len(demand.targets)
    senders = (source, *demand.targets)[:count] if relay else (source,) * count
    return Piece(index, 0, demand.nbytes, tuple(zip(senders, demand.targets, strict=True)))


def assign_split(demands: Sequence[Demand], *, rates: Rates) -> tuple[list[Piece], float]:
    """The division with the least busy card, and the seconds of that card: the lower bound."""
    load, into = np.zeros(len(rates), np.int64), np.zeros(len(rates), np.int64)
    for demand in demands:
        for a, b in demand.hops:
            load[a] += demand.nbytes
            into[b] += demand.nbytes
        for b in demand.targets:
            into[b] += demand.nbytes
        if _is_forced(demand):
            load[demand.sources[0]] += demand.nbytes * len(demand.targets)
    free = [demand for demand in demands if not _is_forced(demand)]
    # The first copy of all must come from a source; any other may come from a host that has it by then.
    firsts = [Supply(demand.nbytes, demand.sources) for demand in free]
    others = [Supply(d.nbytes * (len(d.targets) - 1), (*d.sources, *d.targets)) for d in free]
    entering = float(np.max(into / rates, initial=0.0))
    split = split_least(firsts + others, load=load, rates=rates, at_least=entering)
    if _passes_on(free, split.amounts[len(free) :]):
        # A card that is not quite full forgives a chunk that comes late: passing on is spread over all hosts.
        split = split_least(firsts + others, load=load, rates=rates, at_least=0.0)
    amounts = iter(zip(split.amounts[: len(free)], split.amounts[len(free) :], strict=True))
    pieces: list[Piece] = []
    for i, demand in enumerate(demands):
        if _is_forced(demand):
            pieces.append(whole(i, demand, demand.sources[0], relay=False))
        else:
            pieces += _trees(i, demand, _sent(demand, *next(amounts)))
    return pieces, max(entering, split.seconds)


def lower_bound(tensors: Sequence[TensorSpec], cluster: DeclaredCluster) -> float:
    """Seconds of the busiest network card under the best choice of senders: no plan is faster."""
    _, streams = find_units(tensors)
    demands = find_demands(streams, hosts_by_rank(tensors))
    return assign_split(demands.demands, rates=cluster.rates)[1]


def _passes_on(demands: Sequence[Demand], others: Sequence[Sequence[int]]) -> bool:
    """Whether any target sends."""
    return any(any(sent[len(d.sources) :]) for d, sent in zip(demands, others, strict=True))


def _is_forced(demand: Demand) -> bool:
    return len(demand.sources) == 1 and len(demand.targets) < 2


def _sent(demand: Demand, firsts: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """(host, bytes that it sends), sources before targets."""
    hosts = (*demand.sources, *demand.targets)
    sent = dict(zip(hosts, others, strict=True))
    for host, amount in zip(demand.sources, firsts, strict=True):
        sent[host] += amount
    return [(host, amount) for host, amount in sent.items() if amount]


def _trees(index: int, demand: Demand, sent: Sequence[tuple[int, int]]) -> list[Piece]:
    """Pieces in which every host sends as much as `sent` says.

    Each of n targets receives each byte once, so n layers of the demand's length are sent in all. The
    senders are laid along the layers end to end, sources first; so every byte has n senders, the first of
    them a source, and the cuts are where a sender changes in any layer.
    """
    size = demand.nbytes
    grain = demand.itemsize * (1 << max(0, (size // (demand.itemsize * _GRAINS)).bit_length() - 1))
    ends = np.cumsum([amount for _, amount in sent])
    ends[:-1] = ends[:-1] // size * size + np.minimum(np.round(ends[:-1] % size / grain) * grain, size)
    cuts = sorted({0, size, *(int(end) % size for end in ends)})
    hosts = [host for host, _ in sent]
    pieces: list[Piece] = []
    for start, stop in pairwise(cuts):
        layers = start + size * np.arange(len(demand.targets))
        senders = [hosts[k] for k in np.searchsorted(ends, layers, side="right")]
        edges = _tree(senders, demand.targets)
        # Terms are reduced once, whoever needs the sum; without terms each branch goes its own way.
        parts = [edges] if demand.chain else _branches(edges, demand.sources)
        pieces += [Piece(index, start, stop, part) for part in parts]
    return pieces


def _tree(senders: Sequence[int], targets: Sequence[int]) -> tuple[Edge, ...]:
    """Edges to all targets, one from each of `senders`; those that are targets come after all that are not.

    Targets that send receive first, in the order in which they send: then whoever sends has received.

    >>> _tree([0, 2, 3], targets=(1, 2, 3))
    ((0, 2), (2, 3), (3, 1))
    """
    relays = [host for host in dict.fromkeys(senders) if host in targets]
    receivers = relays + [host for host in targets if host not in relays]
    return tuple(zip(senders, receivers, strict=True))


def _branches(edges: Sequence[Edge], sources: Sequence[int]) -> list[tuple[Edge, ...]]:
    """The edges below each edge that leaves a source, so that these can be ordered one by one.

    >>> _branches([(0, 2), (0, 3), (2, 4)], sources=(0,))
    [((0, 2), (2, 4)), ((0, 3),)]
    """
    branch_of: dict[int, int] = {}
    branches: list[list[Edge]] = []
    for a, b in edges:
        if a in sources:
            branch_of[b] = len(branches)
            branches.append([])
        else:
            branch_of[b] = branch_of[a]
        branches[branch_of[b]].append((a, b))
    return [tuple(branch) for branch in branches]


@dataclass(frozen=True)
class Supply:
    """An amount of bytes that any of some hosts may send."""

    nbytes: int
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Who sends how much: `amounts[i][k]` bytes of supply i by its k-th host, in `seconds` at best."""

    amounts: tuple[tuple[int, ...], ...]
    seconds: float


def split_least(supplies: Sequence[Supply], *, load: Ints, rates: NDArray[np.float64], at_least: float) -> Split:
    """Splits supplies among their hosts so that the largest (load + sent) / rate is least.

    load: bytes that each host sends in any case; `at_least` seconds are allowed whatever is sent

    >>> both = Supply(100, hosts=(0, 1))
    >>> split_least([both], load=np.array([60, 0]), rates=np.ones(2), at_least=0.0)
    Split(amounts=((20, 80),), seconds=80.0)
    """
    seconds = max(at_least, float(np.max(load / rates, initial=0.0)))
    while True:
        # The tenth of a byte absorbs the rounding of a T that was computed from a cut.
        whole = np.floor(seconds * rates + 0.1)
        network = _Network(supplies, np.maximum(whole.astype(np.int64) - load, 0))
        if network.push() == sum(supply.nbytes for supply in supplies):
            return Split(network.amounts(), seconds)
        wanted, hosts = network.cut()
        # Nothing changes before some card has room for one more byte.
        seconds = max(float(wanted + load[hosts].sum()) / float(rates[hosts].sum()), float(np.min((whole + 1) / rates)))


class _Network:
    """Dinic's maximum flow from supplies (nodes 0 .. s-1) through hosts (s ..) in two layers.

    An edge's residual capacity is in `left`; its reverse is the edge with the last bit flipped.
    """

    def __init__(self, supplies: Sequence[Supply], room: Ints) -> None:
        self.supplies = supplies
        self.source, self.sink = len(supplies) + len(room), len(supplies) + len(room) + 1
        self.to: list[int] = []
        self.left: list[int] = []
        self.edges: list[list[int]] = [[] for _ in range(self.sink + 1)]
        for host, capacity in enumerate(room.tolist()):
            self._add(len(supplies) + host, self.sink, capacity)
        self.first: list[int] = []
        for i, supply in enumerate(supplies):
            self._add(self.source, i, supply.nbytes)
            self.first.append(len(self.to))
            for host in supply.hosts:
                self._add(i, len(supplies) + host, supply.nbytes)

    def _add(self, a: int, b: int, capacity: int) -> None:
        for start, end, left in ((a, b, capacity), (b, a, 0)):
            self.edges[start].append(len(self.to))
            self.to.append(end)
            self.left.append(left)

    def push(self) -> int:
        """Pushes all that fits; returns how much."""
        total = 0
        while (level := self._levels())[self.sink] >= 0:
            place = [0] * len(self.edges)
            while found := self._augment(level, place):
                total += found
        return total

    def _levels(self) -> list[int]:
        level = [-1] * len(self.edges)
        level[self.source] = 0
        queue = deque([self.source])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                if self.left[edge] and level[self.to[edge]] < 0:
                    level[self.to[edge]] = level[node] + 1
                    queue.append(self.to[edge])
        return level

    def _augment(self, level: list[int], place: list[int]) -> int:
        """One path to the sink along rising levels; `place` remembers which edges are spent."""
        path: list[int] = []
        node = self.source
        while node != self.sink:
            edges = self.edges[node]
            while place[node] < len(edges):
                edge = edges[place[node]]
                if self.left[edge] and level[self.to[edge]] == level[node] + 1:
                    break
                place[node] += 1
            else:
                if not path:
                    return 0
                node = self.to[path.pop() ^ 1]
                place[node] += 1
                continue
            path.append(edge)
            node = self.to[edge]
        amount = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount
        return amount

    def amounts(self) -> tuple[tuple[int, ...], ...]:
        """How much of each supply each of its hosts sends."""
        return tuple(
            tuple(self.left[(first + 2 * k) ^ 1] for k in range(len(supply.hosts)))
            for first, supply in zip(self.first, self.supplies, strict=True)
        )

    def cut(self) -> tuple[int, list[int]]:
        """The bytes that cannot be sent in time, with the hosts that are the only ones to send them."""
        level = self._levels()
        wanted = sum(supply.nbytes for i, supply in enumerate(self.supplies) if level[i] >= 0)
        count = len(self.supplies)
        return wanted, [node - count for node in range(count, self.source) if level[node] >= 0]
