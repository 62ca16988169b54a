"""The paper's way to order: whole transfers, one at a time on each card, by search.

A *job* is a transfer that keeps the sender's card and the cards of all its receivers busy for some seconds
(a chain over hosts in many chunks). Jobs start in a given order, each as soon as its cards are free. For few
jobs a depth-first search with pruning finds the best senders and order; for many, a greedy order with random
ties is tried some times. Kept as the comparison for `open_shop.py`, which splits and preempts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

_EPSILON = 1e-12


@dataclass(frozen=True)
class Job:
    """`seconds` on the cards of one of `senders` (out) and of all `receivers` (in)."""

    seconds: float
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Jobs in the order of their start: `jobs[k]` is an index, `senders[k]` its sender, `starts[k]` when."""

    jobs: tuple[int, ...]
    senders: tuple[int, ...]
    starts: tuple[float, ...]
    seconds: float


def in_order(jobs: Sequence[Job], senders: Sequence[int]) -> Schedule:
    """Each job in turn, from `senders[i]`, as soon as its cards are free.

    >>> crossing = [Job(1.0, (h,), (d,)) for d in (2, 3) for h in (0, 1)]
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
    return Schedule(tuple(order), tuple(senders[i] for i in order), tuple(starts[i] for i in order), end)


def least(jobs: Sequence[Job], senders: Sequence[int]) -> float:
    """The busiest card: no order of these senders is shorter."""
    busy: dict[object, float] = {}
    for job, sender in zip(jobs, senders, strict=True):
        for card in _cards(job, sender):
            busy[card] = busy.get(card, 0.0) + job.seconds
    return max(busy.values(), default=0.0)


def greedy(jobs: Sequence[Job], senders: Sequence[int], *, trials: int = 20, seed: int = 0) -> Schedule:
    """The best of some greedy orders: of the jobs whose cards are free, the one with the most left to do on
    its busiest card starts; ties are random.

    >>> crossing = [Job(1.0, (h,), (d,)) for d in (2, 3) for h in (0, 1)]
    >>> greedy(crossing, [0, 1, 0, 1]).seconds
    2.0
    """
    chance = random.Random(seed)
    bound = least(jobs, senders)
    best: Schedule | None = None
    for _ in range(trials):
        found = _greedy_once(jobs, senders, chance)
        if best is None or found.seconds < best.seconds:
            best = found
        if best.seconds <= bound + _EPSILON:
            break
    assert best is not None
    return best


def _greedy_once(jobs: Sequence[Job], senders: Sequence[int], chance: random.Random) -> Schedule:
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
    return Schedule(tuple(order), tuple(senders[i] for i in order), tuple(starts), end)


def depth_first(jobs: Sequence[Job], *, most_steps: int = 20_000) -> Schedule:
    """The best senders and order, if the search ends within `most_steps`; the best one seen otherwise."""
    return _Search(jobs, most_steps).run()


class _Search:
    """Branch and bound over (next job, its sender); a branch ends where its busiest card is no better."""

    def __init__(self, jobs: Sequence[Job], most_steps: int) -> None:
        self.jobs = jobs
        self.steps = most_steps
        self.best: Schedule | None = None

    def run(self) -> Schedule:
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
            self.best = Schedule(jobs, hosts, times, found.seconds)
            return
        tried: set[Job] = set()
        for i, job in enumerate(self.jobs):
            if i in order or job in tried:  # equal jobs are tried once
                continue
            tried.add(job)
            for sender in job.senders:
                self._try(i, job, sender, order, senders, free, end)

    def _try(
        self, i: int, job: Job, sender: int, order: list[int], senders: list[int], free: dict[object, float], end: float
    ) -> None:
        cards = _cards(job, sender)
        finish = max(free.get(card, 0.0) for card in cards) + job.seconds
        end = max(end, finish)
        promising = self.best is None or (self.steps > 0 and self._at_least(i, order, cards, finish, free, end))
        if promising:
            self._extend([*order, i], [*senders, sender], {**free, **dict.fromkeys(cards, finish)}, end)

    def _at_least(
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


def _cards(job: Job, sender: int) -> list[object]:
    return [("out", sender), *(("in", host) for host in job.receivers)]
