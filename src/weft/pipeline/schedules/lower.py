"""From a schedule and a stage graph to what every rank does, sends and receives included. Pure.

A skip tensor goes once to each rank that uses it, from the stage that made it or from one that has it already,
whichever card is free first. That is decided here on a clock, with the costs given, so that a run only obeys.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.pipeline.schedules.costs import Costs, TransferNeed, Transfers, transfer_needs
from weft.pipeline.schedules.graph import Action, Kind, StageGraph, Steps, chain
from weft.pipeline.schedules.lowered import Direction, Lowered, Operation, Receive, Send, TensorTransfer
from weft.pipeline.schedules.schedule import Schedule, validate

_DEFAULT_TRANSFER = 0.5  # of a forward, where no costs are given


def lower(
    schedule: Schedule,
    graph: StageGraph | None = None,
    *,
    costs: Costs | None = None,
    transfers: Transfers = Transfers.OVERLAPPED,
) -> Lowered:
    """Inserts the sends and receives; a plain chain without a graph, equal stages without costs.

    A send comes right after the action that makes its tensor. A receive comes where the tensor could arrive
    (overlapped), or right before the action that needs it (synchronous): earlier only where ranks that stop for
    their transfers would otherwise wait in a circle.

    >>> from weft.pipeline import schedule
    >>> print(lower(schedule("gpipe", stages=2, microbatches=1)))
    lowered gpipe: 1 micro-batches, 2 stages: 0->1 x
    rank 0
      0F0
      send 0: 0.x#0 0->1
      receive 1: 0.x#0 1->0
      0B0
    rank 1
      receive 0: 0.x#0 0->1
      1F0
      1B0
      send 1: 0.x#0 1->0
    """
    graph = chain(schedule.stages) if graph is None else graph
    costs = Costs.uniform(schedule.stages, transfer=_DEFAULT_TRANSFER) if costs is None else costs
    return insert(decide(schedule, graph, costs), transfers)


@dataclass(frozen=True)
class Decision:
    """Who sends what, by a run on the clock in which transfers go beside computing.

    wanted:  what must get from rank to rank, the most urgent first
    senders: the stage that sends each of them
    run:     the run
    """

    schedule: Schedule
    graph: StageGraph
    steps: Steps
    wanted: Sequence[TransferNeed]
    senders: Sequence[int]
    run: ClockRun


def decide(schedule: Schedule, graph: StageGraph, costs: Costs) -> Decision:
    """Lets every transfer start as soon as it can, from whoever can send it."""
    steps = validate(schedule, graph)
    wanted = transfer_needs(schedule, graph, steps)
    run = Clock(schedule, graph, costs, wanted).run()
    senders = [0] * len(wanted)
    for transfer, i, _, _ in run.transfers:
        senders[i] = transfer.source
    return Decision(schedule, graph, steps, wanted, senders, run)


def insert(decision: Decision, transfers: Transfers) -> Lowered:
    """The lists of the ranks with the decided transfers in them."""
    schedule, steps, wanted, senders = decision.schedule, decision.steps, decision.wanted, decision.senders
    if transfers is Transfers.SYNCHRONOUS:
        even = Costs.uniform(schedule.stages, backward=1.0)
        late = _late_positions(schedule, steps, wanted, senders)
        positions = Clock(schedule, decision.graph, even, wanted, senders=senders, positions=late).run().positions
    else:
        positions = _early_positions(schedule, steps, wanted, senders)
    ranks = _insert(schedule, wanted, senders, positions)
    return Lowered(schedule, decision.graph, ranks, tuple(transfer for transfer, _, _, _ in decision.run.transfers))


def _early_positions(
    schedule: Schedule, steps: Steps, wanted: Sequence[TransferNeed], senders: Sequence[int]
) -> list[Position]:
    """Both parts of a transfer before the first action of a step in which the tensor exists.

    All lists then follow one order of all actions and transfers, so no rank waits in a circle.
    """
    steps_of = [[steps.of[action] for action in actions] for actions in schedule.ranks]

    def place(stage: int, step: int) -> int:
        return bisect.bisect_left(steps_of[schedule.rank_of(stage)], step)

    return [
        Position(place(source, each.made_in), place(each.target, each.made_in))
        for each, source in zip(wanted, senders, strict=True)
    ]


def _late_positions(
    schedule: Schedule, steps: Steps, wanted: Sequence[TransferNeed], senders: Sequence[int]
) -> list[Position]:
    """The send right after the maker, the receive right before the user; who passes on does so on receiving."""
    place = {action: i for actions in schedule.ranks for i, action in enumerate(actions)}
    at_step = [{steps.of[action]: place[action] for action in actions} for actions in schedule.ranks]
    receive = [at_step[schedule.rank_of(each.target)][each.needed_in] for each in wanted]
    index = {_key(each, each.target): i for i, each in enumerate(wanted) if each.direction is Direction.FORWARD}
    return [
        Position(place[each.made_by] + 1 if source == each.sources[0] else receive[index[_key(each, source)]], received)
        for each, source, received in zip(wanted, senders, receive, strict=True)
    ]


def _key(each: TransferNeed, target: int) -> tuple[int, str, int, int]:
    return (each.edge.source, each.edge.tensor, each.microbatch, target)


def _insert(
    schedule: Schedule, wanted: Sequence[TransferNeed], senders: Sequence[int], positions: Sequence[Position]
) -> tuple[tuple[Operation, ...], ...]:
    """The lists of actions with the parts of transfers in their places."""
    hops = _hops(wanted, senders)
    at: dict[tuple[int, int], list[tuple[tuple[int, int, int], Send | Receive]]] = defaultdict(list)
    for i, (each, source, position) in enumerate(zip(wanted, senders, positions, strict=True)):
        transfer = each.sent_by(source)
        order = (each.made_in, hops[transfer], i)
        at[schedule.rank_of(source), position.send].append((order, Send(transfer)))
        at[schedule.rank_of(each.target), position.receive].append((order, Receive(transfer)))
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        operations: list[Operation] = []
        slots: list[tuple[Action, ...]] = [*((action,) for action in actions), ()]
        for i, slot in enumerate(slots):
            operations += [part for _, part in sorted(at[rank, i], key=lambda pair: pair[0])]
            operations += slot
        ranks.append(tuple(operations))
    return tuple(ranks)


def _hops(wanted: Sequence[TransferNeed], senders: Sequence[int]) -> dict[TensorTransfer, int]:
    """How often each tensor has been passed on before this transfer; 0 if its maker sends it."""
    source_of = {_key(each, each.target): s for each, s in zip(wanted, senders, strict=True)}
    hops: dict[TensorTransfer, int] = {}
    for each, source in zip(wanted, senders, strict=True):
        count, stage = 0, source
        while stage != each.sources[0]:
            count, stage = count + 1, source_of[_key(each, stage)]
        hops[each.sent_by(source)] = count
    return hops


@dataclass(frozen=True)
class Position:
    """After how many of its actions the sending, and the receiving, rank posts its part of a transfer."""

    send: int
    receive: int


@dataclass
class ClockRun:
    """What happened on the clock.

    actions:   start and end of each action
    transfers: each with the index of its need, its start and its end, in the order of starts
    positions: as given, but for those that had to come earlier
    """

    actions: dict[Action, tuple[float, float]] = field(default_factory=dict)
    transfers: list[tuple[TensorTransfer, int, float, float]] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)


class Clock:
    """Runs actions and transfers: ranks compute in order, cards carry one tensor in and one out at a time.

    A transfer may start once one of its sources has the tensor and the cards at both ends are free; among those that
    may, the most urgent goes first, from whichever source's card is free. With `positions` ranks stop computing for
    their transfers: those between two actions are posted at once, and the second action waits for all of them.
    """

    def __init__(
        self,
        schedule: Schedule,
        graph: StageGraph,
        costs: Costs,
        needs: Sequence[TransferNeed],
        *,
        senders: Sequence[int] | None = None,
        positions: Sequence[Position] | None = None,
    ) -> None:
        """`needs` are sorted by urgency; `senders` fixes who sends each of them."""
        if costs.stages != schedule.stages:
            raise ValueError(
                f"got costs of {costs.stages} stages for a schedule of {schedule.stages}; expected the same number"
            )
        self._schedule, self._costs, self._needs = schedule, costs, needs
        self._senders = senders
        self._waits_for = _needs_of_actions(schedule, graph, needs)
        self._made_by: dict[Action, list[int]] = defaultdict(list)
        self._passed_on: dict[tuple[int, str, int, int], list[int]] = defaultdict(list)
        for i, each in enumerate(needs):
            self._made_by[each.made_by].append(i)
            for user in each.sources[1:]:
                self._passed_on[each.edge.source, each.edge.tensor, each.microbatch, user].append(i)
        self._run = ClockRun(positions=list(positions or ()))
        self._blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, position in enumerate(self._run.positions):
            assert senders is not None
            self._blocks[schedule.rank_of(senders[i]), position.send].append(i)
            self._blocks[schedule.rank_of(needs[i].target), position.receive].append(i)
        self._done = [0] * len(schedule.ranks)
        self._busy = [False] * len(schedule.ranks)
        self._holders: dict[int, list[int]] = defaultdict(list)
        self._open: list[int] = []  # indices of needs that someone could meet, the most urgent first
        self._arrived: set[int] = set()
        self._sending: set[int] = set()  # cards
        self._receiving: set[int] = set()
        self._events: list[tuple[float, int, Action | tuple[int, int]]] = []

    def run(self) -> ClockRun:
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
            waits_for = (*self._waits_for[action], *self._blocks[rank, self._done[rank]])
            if self._arrived.issuperset(waits_for):
                self._busy[rank] = True
                end = now + self._costs.of(action)
                self._run.actions[action] = (now, end)
                self._push(end, action)

    def _free_source(self, i: int) -> int | None:
        """Who can send now what is needed."""
        each = self._needs[i]
        if self._run.positions and self._done[self._schedule.rank_of(each.target)] < self._run.positions[i].receive:
            return None
        for source in self._holders[i]:
            if self._senders is not None and source != self._senders[i]:
                continue
            if self._run.positions and self._done[self._schedule.rank_of(source)] < self._run.positions[i].send:
                continue
            out, into = self._cards(i, source)
            if self._sending.isdisjoint(out) and self._receiving.isdisjoint(into):
                return source
        return None

    def _cards(self, i: int, source: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cards that send and those that receive; none inside a host."""
        out = self._costs.cards_of(source, self._schedule)
        into = self._costs.cards_of(self._needs[i].target, self._schedule)
        return ((), ()) if out == into and len(out) == 1 else (out, into)

    def _start_transfer(self, i: int, source: int, now: float) -> None:
        each = self._needs[i]
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
                self._offer(i, self._needs[i].sources[0])
            return
        i, source = what
        each = self._needs[i]
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
        rank = self._schedule.rank_of(self._needs[i].target)
        position = self._run.positions[i]
        assert position.receive > self._done[rank], "transfers got stuck though both ranks are there"
        self._blocks[rank, position.receive].remove(i)
        self._run.positions[i] = Position(position.send, self._done[rank])
        self._blocks[rank, self._done[rank]].append(i)

    def _sender_is_there(self, i: int) -> bool:
        assert self._senders is not None
        source = self._senders[i]
        posted = self._done[self._schedule.rank_of(source)] >= self._run.positions[i].send
        return posted and source in self._holders[i]

    def _push(self, time: float, what: Action | tuple[int, int]) -> None:
        heapq.heappush(self._events, (time, len(self._run.actions) + len(self._run.transfers), what))


def _needs_of_actions(schedule: Schedule, graph: StageGraph, needs: Sequence[TransferNeed]) -> dict[Action, list[int]]:
    """By index, those that each action waits for."""
    to_rank: dict[tuple[int, str, int, int], int] = {}
    gradients: dict[Action, list[int]] = defaultdict(list)
    for i, each in enumerate(needs):
        if each.direction is Direction.FORWARD:
            rank = schedule.rank_of(each.target)
            to_rank[each.edge.source, each.edge.tensor, each.microbatch, rank] = i
        else:
            gradients[schedule.gradient(each.target, each.microbatch)].append(i)
    found: dict[Action, list[int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            edges = graph.into(action.stage) if action.kind is Kind.FORWARD else ()
            wanted = ((edge.source, edge.tensor, action.microbatch, rank) for edge in edges)
            found[action] = [to_rank[key] for key in wanted if key in to_rank] + gradients[action]
    return found
