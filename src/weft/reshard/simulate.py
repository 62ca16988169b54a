"""What the executor will do, predicted without it: who sends what when, on cards of the declared rates.

The rules are the executor's own. A rank posts its sends and its receives in the order of the chunks, a few
ahead of the oldest that is not through; what it received it passes on at once. A message moves when both
sides have posted it; messages of the same pair of ranks go one after the other; and connections share a card
as TCP does, evenly but for those that are held up elsewhere (max-min fair).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.reshard.order import RECEIVES_AHEAD, SENDS_AHEAD
from weft.timeline import Event, Timeline

if TYPE_CHECKING:
    from weft.reshard.plan import Plan

_DONE = 1e-6  # bytes

Floats = NDArray[np.float64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class ReshardSimulation:
    """When each hop of a plan starts and ends, in seconds."""

    start: Floats
    end: Floats

    @property
    def seconds(self) -> float:
        """When the last hop ends."""
        return float(self.end.max(initial=0.0))

    def timeline(self, plan: Plan) -> Timeline:
        """A lane for each direction of each card; hops inside a host are on no card."""
        events = []
        a_host, b_host = (hosts.tolist() for hosts in plan.hop_hosts)
        sizes, hops = plan.hop_bytes.tolist(), plan.hops
        for h, (a, b) in enumerate(zip(a_host, b_host, strict=True)):
            if a == b:
                continue
            chunk, start, end = int(hops.chunk[h]), float(self.start[h]), float(self.end[h])
            there, here = f"to rank {hops.receiver[h]}", f"from rank {hops.sender[h]}"
            events.append(Event(f"host {a}/out", "send", f"chunk {chunk} {there}", start, end, bytes=sizes[h]))
            events.append(Event(f"host {b}/in", "recv", f"chunk {chunk} {here}", start, end, bytes=sizes[h]))
        return Timeline(events, name=f"{plan.strategy}, predicted")


def simulate(plan: Plan) -> ReshardSimulation:
    """Runs the plan's hops on its cluster; an AssertionError names the hops that would wait for ever."""
    return _Run(plan).run()


class _Queue:
    """A rank's posts in order: at most `ahead` past the oldest that is not done."""

    def __init__(self, ahead: int) -> None:
        self.hops: list[int] = []
        self.ahead = ahead
        self._oldest = 0
        self._posted = 0

    def advance(self, done: NDArray[np.bool_]) -> list[int]:
        """The hops that may be posted now."""
        while self._oldest < len(self.hops) and done[self.hops[self._oldest]]:
            self._oldest += 1
        end = min(len(self.hops), self._oldest + self.ahead)
        fresh = self.hops[self._posted : end]
        self._posted = max(self._posted, end)
        return fresh


class _Run:
    def __init__(self, plan: Plan) -> None:
        hops = plan.hops
        self.plan = plan
        self.senders, self.receivers = hops.sender.tolist(), hops.receiver.tolist()
        self.left = plan.hop_bytes.astype(np.float64).tolist()
        hosts = zip(*(column.tolist() for column in plan.hop_hosts), strict=True)
        self.cards: list[Pair | None] = [None if a == b else (a, b) for a, b in hosts]
        count = len(hops)
        self.start, self.end = np.zeros(count), np.zeros(count)
        self.done = np.zeros(count, bool)
        self.posts = [0] * count  # sides that have posted it
        self.after: list[list[int]] = [[] for _ in range(count)]  # what a hop's receiver passes on
        self.lines: dict[Pair, deque[int]] = {}  # messages on each connection, the first is moving
        self.sends: dict[int, _Queue] = {}
        self.receives: dict[int, _Queue] = {}
        self.now = 0.0
        self._fill_queues()

    def _fill_queues(self) -> None:
        """A hop that follows another of its chunk waits for it; others are the sender's own."""
        brought: dict[Pair, int] = {}  # (chunk, rank) -> the hop that brings it
        for h, chunk in enumerate(self.plan.hops.chunk.tolist()):
            a, b = self.senders[h], self.receivers[h]
            if a == b:
                self.done[h] = True
                continue
            if (chunk, a) in brought:
                self.after[brought[chunk, a]].append(h)
            else:
                self.sends.setdefault(a, _Queue(SENDS_AHEAD)).hops.append(h)
            self.receives.setdefault(b, _Queue(RECEIVES_AHEAD)).hops.append(h)
            brought[chunk, b] = h

    def run(self) -> ReshardSimulation:
        for queue in (*self.sends.values(), *self.receives.values()):
            self._post(queue.advance(self.done))
        while not self.done.all():
            assert self.lines, f"hops that wait for ever: {np.nonzero(~self.done)[0][:10].tolist()}"
            moving = {pair: line[0] for pair, line in self.lines.items()}
            speed = fair_rates({pair: self.cards[h] for pair, h in moving.items()}, self.plan.cluster.rates)
            step = min(self.left[h] / speed[pair] for pair, h in moving.items())
            self.now += step
            for pair, h in moving.items():
                self.left[h] -= step * speed[pair]
            for pair, h in moving.items():
                if self.left[h] <= _DONE:
                    self._finish(pair, h)
        return ReshardSimulation(self.start, self.end + self.plan.cluster.latency * (self.end > 0))

    def _post(self, hops: list[int]) -> None:
        for h in hops:
            self.posts[h] += 1
            if self.posts[h] == 2:
                line = self.lines.setdefault((self.senders[h], self.receivers[h]), deque())
                if not line:
                    self.start[h] = self.now
                line.append(h)

    def _finish(self, pair: Pair, h: int) -> None:
        self.done[h], self.end[h] = True, self.now
        line = self.lines[pair]
        line.popleft()
        if line:
            self.start[line[0]] = self.now
        else:
            del self.lines[pair]
        if self.senders[h] in self.sends:
            self._post(self.sends[self.senders[h]].advance(self.done))
        self._post(self.receives[self.receivers[h]].advance(self.done))
        self._post(self.after[h])


def fair_rates(cards: dict[Pair, Pair | None], rates: Floats) -> dict[Pair, float]:
    """Bytes/s of each connection: the most even division of the cards that leaves none of them idle.

    >>> rates = fair_rates({(0, 8): (0, 2), (1, 9): (1, 2), (1, 7): (1, 3)}, np.ones(4))
    >>> rates[0, 8], rates[1, 7]
    (0.5, 0.5)
    """
    inside = 100.0 * float(rates.max())  # a copy inside a host: not free, but never the bottleneck
    speed = {pair: inside for pair, card in cards.items() if card is None}
    sides = {pair: (("out", card[0]), ("in", card[1])) for pair, card in cards.items() if card is not None}
    users: dict[tuple[str, int], list[Pair]] = {}
    for pair, (out, into) in sides.items():
        users.setdefault(out, []).append(pair)
        users.setdefault(into, []).append(pair)
    room = {side: float(rates[side[1]]) for side in users}
    count = {side: len(pairs) for side, pairs in users.items()}
    while count:
        tightest = min(count, key=lambda side: room[side] / count[side])
        share = room[tightest] / count[tightest]
        for pair in users[tightest]:
            if pair in speed:
                continue
            speed[pair] = share
            for side in sides[pair]:
                room[side] -= share
                count[side] -= 1
        count = {side: n for side, n in count.items() if n}
    return speed
