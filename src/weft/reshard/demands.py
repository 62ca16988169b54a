"""Demands: what must cross between hosts, without the ranks.

All streams that lie on the same hosts and are needed on the same hosts are one *demand*: their bytes end to
end. The choice of senders and the order are made for demands, because a host's network card is what is scarce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from weft.layout import Ints
from weft.reshard.units import Ranks, Streams

Hosts = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Demand:
    """Bytes that some hosts hold and others need.

    sources: the hosts that hold all of it; with `chain`, the one where the reduced value comes to lie
    targets: the hosts that need it and do not hold it
    chain:   the hosts of the terms that are to be reduced, in order; neighbours differ; `()` without terms

    >>> Demand(nbytes=64, itemsize=4, sources=(0, 1), targets=(2,)).hops
    ()
    """

    nbytes: int
    itemsize: int
    sources: Hosts
    targets: Hosts
    chain: Hosts = ()

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The transfers between hosts that reduce the terms."""
        return tuple(zip(self.chain[:-1], self.chain[1:], strict=True))


@dataclass(frozen=True)
class Demands:
    """The demands of a set of streams.

    of_stream: [s] the demand of each stream, -1 where nothing crosses between ranks of different hosts
    start:     [s] the stream's first byte in its demand
    shares:    [h, 2] pairs (stream, host): takers on a host that holds the stream, served inside it
    chains:    for each set of holders the ranks that reduce its terms, in order; `()` for one term
    """

    demands: tuple[Demand, ...]
    of_stream: Ints
    start: Ints
    shares: Ints
    chains: tuple[Ranks, ...]


def find_demands(streams: Streams, host_of: Mapping[int, int], *, merge: bool = True) -> Demands:
    """Groups streams by the hosts of both sides; without `merge` each stream is a demand of its own."""
    chains = tuple(_chain(terms, host_of) for terms in streams.holder_sets)
    sides = [_places(terms, chain, host_of) for terms, chain in zip(streams.holder_sets, chains, strict=True)]
    needs = [tuple(sorted({host_of[rank] for rank in takers})) for takers in streams.taker_sets]
    side_index, side_of = _intern(sides)
    need_index, need_of = _intern(needs)
    side, need = side_of[streams.holders], need_of[streams.takers]
    # One number for (hosts that hold, hosts that need, size of an element).
    key = (streams.itemsize * len(side_index) + side) * len(need_index) + need
    _, first, kind = np.unique(key if merge else np.arange(len(streams)), return_index=True, return_inverse=True)
    totals = np.bincount(kind, weights=streams.nbytes, minlength=len(first)).astype(np.int64)
    demands: list[Demand] = []
    number = np.full(len(first), -1, np.int64)
    common: list[Hosts] = []
    for i, stream in enumerate(first.tolist()):
        (sources, chain), takers = side_index[side[stream]], need_index[need[stream]]
        targets = tuple(host for host in takers if host not in sources)
        common.append(() if chain else tuple(host for host in takers if host in sources))
        if (targets or chain) and totals[i]:
            number[i] = len(demands)
            item = int(streams.itemsize[stream])
            demands.append(Demand(int(totals[i]), item, sources, targets, _squeeze(chain)))
    start = np.zeros(len(streams), np.int64)
    order = np.argsort(kind, kind="stable")
    ends = np.cumsum(streams.nbytes[order])
    start[order] = ends - streams.nbytes[order] - (np.cumsum(totals) - totals)[kind[order]]
    return Demands(tuple(demands), number[kind], start, _shares(streams, kind, common, host_of), chains)


def _intern(values: Sequence[T]) -> tuple[list[T], Ints]:
    """The distinct values, and for each value its place among them."""
    index: dict[T, int] = {}
    places = [index.setdefault(value, len(index)) for value in values]
    return list(index), np.array(places, np.int64)


def _places(terms: tuple[Ranks, ...], chain: Ranks, host_of: Mapping[int, int]) -> tuple[Hosts, Hosts]:
    """The hosts that can send, and the hosts of the chain."""
    if chain:
        return (host_of[chain[-1]],), tuple(host_of[rank] for rank in chain)
    return tuple(sorted({host_of[rank] for rank in terms[0]})), ()


def _shares(streams: Streams, kind: Ints, common: Sequence[Hosts], host_of: Mapping[int, int]) -> Ints:
    """Streams with a taker that does not hold them on a host that does."""
    near = np.array([bool(hosts) for hosts in common], bool)
    found: list[tuple[int, int]] = []
    for stream in np.nonzero(near[kind])[0].tolist() if len(common) else []:
        (holders,) = streams.holder_sets[streams.holders[stream]]
        takers = {host_of[rank] for rank in streams.taker_sets[streams.takers[stream]] if rank not in holders}
        found += [(stream, host) for host in common[kind[stream]] if host in takers]
    return np.array(found, np.int64).reshape(-1, 2)


def _chain(terms: tuple[Ranks, ...], host_of: Mapping[int, int]) -> Ranks:
    """One holder of each term, in order; on the host of the one before it where that is possible."""
    if len(terms) == 1:
        return ()
    chain: list[int] = []
    for replicas in terms:
        near = [rank for rank in replicas if chain and host_of[rank] == host_of[chain[-1]]]
        chain.append((near or list(replicas))[0])
    return tuple(chain)


def _squeeze(hosts: Hosts) -> Hosts:
    return tuple(host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host)
