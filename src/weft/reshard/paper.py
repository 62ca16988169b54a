"""The paper's way to choose senders and order: whole transfers, one at a time on each card, by search.

A *job* is a transfer that keeps the sender's card and the cards of all its receivers busy for some seconds
(a chain over hosts in many chunks). Jobs start in a given order, each as soon as its cards are free. For few
jobs a depth-first search with pruning finds the best senders and order; for many, a greedy order with random
ties is tried some times. Kept as the comparison for `open_shop` (order), which splits and preempts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.layout import DeclaredCluster
from weft.reshard.senders import Piece, whole
from weft.reshard.units import Demands

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
