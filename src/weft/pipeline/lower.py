"""From a schedule and a stage graph to what every rank does, sends and receives included. Pure.

A skip tensor goes once to each rank that uses it, from the stage that made it or from one that has it already,
whichever card is free first. That is decided here, on the costs given, so that a run only obeys.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.pipeline.action import Action
from weft.pipeline.costs import Costs, Transfers
from weft.pipeline.deliveries import Delivery, deliveries
from weft.pipeline.engine import Engine, Posting, Run
from weft.pipeline.graph import StageGraph, chain
from weft.pipeline.lowered import Direction, Lowered, Operation, Receive, Send, Transfer
from weft.pipeline.schedule import Schedule
from weft.pipeline.validate import Steps, validate

DEFAULT_TRANSFER = 0.5  # of a forward, where no costs are given


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
    costs = Costs.uniform(schedule.stages, transfer=DEFAULT_TRANSFER) if costs is None else costs
    return insert(decide(schedule, graph, costs), transfers)


@dataclass(frozen=True)
class Decision:
    """Who sends what, by a run on the clock in which transfers go beside computing.

    wanted: the deliveries, the most urgent first
    routes: the stage that sends each of them
    run:    the run
    """

    schedule: Schedule
    graph: StageGraph
    steps: Steps
    wanted: Sequence[Delivery]
    routes: Sequence[int]
    run: Run


def decide(schedule: Schedule, graph: StageGraph, costs: Costs) -> Decision:
    """Lets every delivery start as soon as it can, from whoever can send it."""
    steps = validate(schedule, graph)
    wanted = deliveries(schedule, graph, steps)
    run = Engine(schedule, graph, costs, wanted).run()
    routes = [0] * len(wanted)
    for transfer, i, _, _ in run.transfers:
        routes[i] = transfer.source
    return Decision(schedule, graph, steps, wanted, routes, run)


def insert(decision: Decision, transfers: Transfers) -> Lowered:
    """The lists of the ranks with the decided transfers in them."""
    schedule, steps, wanted, routes = decision.schedule, decision.steps, decision.wanted, decision.routes
    if transfers is Transfers.SYNCHRONOUS:
        even = Costs.uniform(schedule.stages, backward=1.0)
        late = _late_postings(schedule, steps, wanted, routes)
        postings = Engine(schedule, decision.graph, even, wanted, routes=routes, postings=late).run().postings
    else:
        postings = _early_postings(schedule, steps, wanted, routes)
    ranks = _insert(schedule, wanted, routes, postings)
    return Lowered(schedule, decision.graph, ranks, tuple(transfer for transfer, _, _, _ in decision.run.transfers))


def _early_postings(
    schedule: Schedule, steps: Steps, wanted: Sequence[Delivery], routes: Sequence[int]
) -> list[Posting]:
    """Both parts of a transfer before the first action of a step in which the tensor exists.

    All lists then follow one order of all actions and transfers, so no rank waits in a circle.
    """
    steps_of = [[steps.of[action] for action in actions] for actions in schedule.ranks]

    def place(stage: int, step: int) -> int:
        return bisect.bisect_left(steps_of[schedule.rank_of(stage)], step)

    return [
        Posting(place(source, each.made_in), place(each.target, each.made_in))
        for each, source in zip(wanted, routes, strict=True)
    ]


def _late_postings(
    schedule: Schedule, steps: Steps, wanted: Sequence[Delivery], routes: Sequence[int]
) -> list[Posting]:
    """The send right after the maker, the receive right before the user; who passes on does so on receiving."""
    place = {action: i for actions in schedule.ranks for i, action in enumerate(actions)}
    at_step = [{steps.of[action]: place[action] for action in actions} for actions in schedule.ranks]
    receive = [at_step[schedule.rank_of(each.target)][each.needed_in] for each in wanted]
    index = {_key(each, each.target): i for i, each in enumerate(wanted) if each.direction is Direction.FORWARD}
    return [
        Posting(place[each.made_by] + 1 if source == each.sources[0] else receive[index[_key(each, source)]], received)
        for each, source, received in zip(wanted, routes, receive, strict=True)
    ]


def _key(each: Delivery, target: int) -> tuple[int, str, int, int]:
    return (each.edge.source, each.edge.tensor, each.microbatch, target)


def _insert(
    schedule: Schedule, wanted: Sequence[Delivery], routes: Sequence[int], postings: Sequence[Posting]
) -> tuple[tuple[Operation, ...], ...]:
    """The lists of actions with the parts of transfers in their places."""
    hops = _hops(wanted, routes)
    at: dict[tuple[int, int], list[tuple[tuple[int, int, int], Send | Receive]]] = defaultdict(list)
    for i, (each, source, posting) in enumerate(zip(wanted, routes, postings, strict=True)):
        transfer = each.sent_by(source)
        order = (each.made_in, hops[transfer], i)
        at[schedule.rank_of(source), posting.send].append((order, Send(transfer)))
        at[schedule.rank_of(each.target), posting.receive].append((order, Receive(transfer)))
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        operations: list[Operation] = []
        slots: list[tuple[Action, ...]] = [*((action,) for action in actions), ()]
        for i, slot in enumerate(slots):
            operations += [part for _, part in sorted(at[rank, i], key=lambda pair: pair[0])]
            operations += slot
        ranks.append(tuple(operations))
    return tuple(ranks)


def _hops(wanted: Sequence[Delivery], routes: Sequence[int]) -> dict[Transfer, int]:
    """How often each tensor has been passed on before this transfer; 0 if its maker sends it."""
    source_of = {_key(each, each.target): s for each, s in zip(wanted, routes, strict=True)}
    hops: dict[Transfer, int] = {}
    for each, source in zip(wanted, routes, strict=True):
        count, stage = 0, source
        while stage != each.sources[0]:
            count, stage = count + 1, source_of[_key(each, stage)]
        hops[each.sent_by(source)] = count
    return hops
