"""Runs actions and deliveries on a clock: ranks compute in order, cards carry one tensor in and one out at a time.

A delivery may start once one of its sources has the tensor and the cards at both ends are free; among those that
may, the most urgent goes first, from whichever source's card is free. With `postings` ranks stop computing for
their transfers: those between two actions are posted at once, and the second action waits for all of them.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.pipeline.action import Action, Kind
from weft.pipeline.costs import Costs
from weft.pipeline.deliveries import Delivery
from weft.pipeline.graph import StageGraph
from weft.pipeline.lowered import Direction, Transfer
from weft.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Posting:
    """After how many of its actions the sending, and the receiving, rank posts its part of a delivery."""

    send: int
    receive: int


@dataclass
class Run:
    """What happened.

    actions:   start and end of each action
    transfers: each with the delivery's index, its start and its end, in the order of starts
    postings:  as given, but for those that had to come earlier
    """

    actions: dict[Action, tuple[float, float]] = field(default_factory=dict)
    transfers: list[tuple[Transfer, int, float, float]] = field(default_factory=list)
    postings: list[Posting] = field(default_factory=list)


class Engine:
    """One run. `deliveries` are sorted by urgency; `routes` fixes who sends each of them."""

    def __init__(
        self,
        schedule: Schedule,
        graph: StageGraph,
        costs: Costs,
        deliveries: Sequence[Delivery],
        *,
        routes: Sequence[int] | None = None,
        postings: Sequence[Posting] | None = None,
    ) -> None:
        if costs.stages != schedule.stages:
            raise ValueError(
                f"got costs of {costs.stages} stages for a schedule of {schedule.stages}; expected the same number"
            )
        self._schedule, self._costs, self._deliveries = schedule, costs, deliveries
        self._routes = routes
        self._needs = _needs(schedule, graph, deliveries)
        self._made_by: dict[Action, list[int]] = defaultdict(list)
        self._passed_on: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)
        for i, each in enumerate(deliveries):
            self._made_by[each.made_by].append(i)
            for user in each.sources[1:]:
                self._passed_on[each.edge.source, each.edge.tensor, each.microbatch, user].append(i)
        self._run = Run(postings=list(postings or ()))
        self._blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, posting in enumerate(self._run.postings):
            assert routes is not None
            self._blocks[schedule.rank_of(routes[i]), posting.send].append(i)
            self._blocks[schedule.rank_of(deliveries[i].target), posting.receive].append(i)
        self._done = [0] * len(schedule.ranks)
        self._busy = [False] * len(schedule.ranks)
        self._holders: dict[int, list[int]] = defaultdict(list)
        self._open: list[int] = []  # deliveries that someone could send, the most urgent first
        self._arrived: set[int] = set()
        self._sending: set[int] = set()  # cards
        self._receiving: set[int] = set()
        self._events: list[tuple[float, int, Action | tuple[int, int]]] = []

    def run(self) -> Run:
        """Runs to the end; the schedule must have been validated."""
        now = 0.0
        while True:
            self._start_all(now)
            if not self._events:
                if not self._open:
                    break
                self._post_earlier()
                continue
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._finish(heapq.heappop(self._events)[2])
        assert len(self._run.actions) == sum(map(len, self._schedule.ranks)), "a validated schedule got stuck"
        return self._run

    def _start_all(self, now: float) -> None:
        for i in list(self._open):
            source = self._free_source(i)
            if source is not None:
                self._start_transfer(i, source, now)
        for rank, actions in enumerate(self._schedule.ranks):
            if self._busy[rank] or self._done[rank] == len(actions):
                continue
            action = actions[self._done[rank]]
            waits_for = (*self._needs[action], *self._blocks[rank, self._done[rank]])
            if self._arrived.issuperset(waits_for):
                self._busy[rank] = True
                end = now + self._costs.of(action)
                self._run.actions[action] = (now, end)
                self._push(end, action)

    def _free_source(self, i: int) -> int | None:
        """Who can send the delivery now."""
        each = self._deliveries[i]
        if self._run.postings and self._done[self._schedule.rank_of(each.target)] < self._run.postings[i].receive:
            return None
        for source in self._holders[i]:
            if self._routes is not None and source != self._routes[i]:
                continue
            if self._run.postings and self._done[self._schedule.rank_of(source)] < self._run.postings[i].send:
                continue
            out, into = self._cards(i, source)
            if self._sending.isdisjoint(out) and self._receiving.isdisjoint(into):
                return source
        return None

    def _cards(self, i: int, source: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cards that send and those that receive; none inside a host."""
        out = self._costs.cards_of(source, self._schedule)
        into = self._costs.cards_of(self._deliveries[i].target, self._schedule)
        return ((), ()) if out == into and len(out) == 1 else (out, into)

    def _start_transfer(self, i: int, source: int, now: float) -> None:
        each = self._deliveries[i]
        out, into = self._cards(i, source)
        self._sending.update(out)
        self._receiving.update(into)
        self._open.remove(i)
        end = now + self._costs.of_transfer(each.edge, each.direction)
        self._run.transfers.append((each.sent_by(source), i, now, end))
        self._push(end, (i, source))

    def _finish(self, what: Action | tuple[int, int]) -> None:
        if isinstance(what, Action):
            rank = self._schedule.rank_of(what.stage)
            self._busy[rank] = False
            self._done[rank] += 1
            for i in self._made_by[what]:
                self._offer(i, self._deliveries[i].sources[0])
            return
        i, source = what
        each = self._deliveries[i]
        out, into = self._cards(i, source)
        self._sending.difference_update(out)
        self._receiving.difference_update(into)
        self._arrived.add(i)
        if each.direction is Direction.FORWARD:
            for other in self._passed_on[each.edge.source, each.edge.tensor, each.microbatch, each.target]:
                if other in self._open:
                    self._offer(other, each.target)

    def _offer(self, i: int, source: int) -> None:
        if not self._holders[i]:
            bisect.insort(self._open, i)
        self._holders[i].append(source)

    def _post_earlier(self) -> None:
        """Ranks that stop for their transfers wait in a circle: the most urgent receive must come where its rank is."""
        i = next(i for i in self._open if self._sender_is_there(i))
        rank = self._schedule.rank_of(self._deliveries[i].target)
        posting = self._run.postings[i]
        assert posting.receive > self._done[rank], "transfers got stuck though both ranks are there"
        self._blocks[rank, posting.receive].remove(i)
        self._run.postings[i] = Posting(posting.send, self._done[rank])
        self._blocks[rank, self._done[rank]].append(i)

    def _sender_is_there(self, i: int) -> bool:
        assert self._routes is not None
        source = self._routes[i]
        posted = self._done[self._schedule.rank_of(source)] >= self._run.postings[i].send
        return posted and source in self._holders[i]

    def _push(self, time: float, what: Action | tuple[int, int]) -> None:
        heapq.heappush(self._events, (time, len(self._run.actions) + len(self._run.transfers), what))


def _needs(schedule: Schedule, graph: StageGraph, deliveries: Sequence[Delivery]) -> dict[Action, list[int]]:
    """The deliveries that each action waits for."""
    to_rank: dict[tuple[int, str, int, int], int] = {}
    gradients: dict[Action, list[int]] = defaultdict(list)
    for i, each in enumerate(deliveries):
        if each.direction is Direction.FORWARD:
            rank = schedule.rank_of(each.target)
            to_rank[each.edge.source, each.edge.tensor, each.microbatch, rank] = i
        else:
            split = schedule.splits_backward(each.target, each.microbatch)
            kind = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
            gradients[Action(each.target, kind, each.microbatch)].append(i)
    needs: dict[Action, list[int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            edges = graph.into(action.stage) if action.kind is Kind.FORWARD else ()
            wanted = ((edge.source, edge.tensor, action.microbatch, rank) for edge in edges)
            needs[action] = [to_rank[key] for key in wanted if key in to_rank] + gradients[action]
    return needs
