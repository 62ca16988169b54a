"""Who sends what: demands become pieces, each with a tree of transfers between hosts.

    balanced   the host that has the least to send so far sends it, large demands first
    split      a demand is divided among all hosts that hold it, and hosts that received it pass it on,
               so that the busiest card is the least busy that it can be (`flow.py`)

A host that needs a demand receives it once, whoever sends it; so what enters a card is given, and only what
leaves a card is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.layout import Ints
from weft.reshard.demands import Demand
from weft.reshard.flow import Supply, split_least

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


def loads(demands: Sequence[Demand], pieces: Sequence[Piece], hosts: int) -> tuple[Ints, Ints]:
    """Bytes out of and into each host's card: two arrays [hosts]."""
    out, into = np.zeros(hosts, np.int64), np.zeros(hosts, np.int64)
    for piece in pieces:
        for a, b in (*demands[piece.demand].hops, *piece.edges):
            out[a] += piece.nbytes
            into[b] += piece.nbytes
    return out, into


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
