"""The choice of senders that makes the busiest network card least busy, exactly, by maximum flow.

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

import numpy as np
from numpy.typing import NDArray

from weft.layout import Ints


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
