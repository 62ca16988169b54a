"""What a step is expected to do: its timeline, its length, its bubble, what it keeps in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.action import Action, Kind
from weft.pipeline.bound import lower_bound
from weft.pipeline.costs import Costs, Transfers
from weft.pipeline.deliveries import Delivery, deliveries
from weft.pipeline.engine import Engine, Posting, Run
from weft.pipeline.graph import StageGraph, chain
from weft.pipeline.lower import decide, insert
from weft.pipeline.lowered import Direction, Lowered, Receive, Send, Transfer
from weft.pipeline.schedule import Schedule
from weft.pipeline.validate import validate
from weft.timeline import Event, Timeline
from weft.timeline.text import format_seconds


@dataclass(frozen=True, eq=False)
class Simulation:
    """The prediction for one step.

    lowered:   what was run
    costs:     with what
    transfers: beside computing, or instead of it
    actions:   start and end of each action, in seconds
    moves:     start and end of each transfer
    """

    lowered: Lowered
    costs: Costs
    transfers: Transfers
    actions: dict[Action, tuple[float, float]]
    moves: dict[Transfer, tuple[float, float]]

    @property
    def schedule(self) -> Schedule:
        """The schedule that was run."""
        return self.lowered.schedule

    @cached_property
    def seconds(self) -> float:
        """The length of the step: until the last action has ended."""
        return max(end for _, end in self.actions.values())

    @cached_property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute."""
        computing = sum(self.costs.of(action) for action in self.actions)
        return max(0.0, 1.0 - computing / (self.seconds * len(self.schedule.ranks)))

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most micro-batches that each stage keeps activations of at once; exact, as it is the order's alone."""
        return self.schedule.peak_activations

    @cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """The most tensors that lie on each stage at once, arrived or arriving, before the stage begins with them."""
        changes: list[list[tuple[float, int]]] = [[] for _ in range(self.schedule.stages)]
        for move, (start, _) in self.moves.items():
            if move.direction is Direction.FORWARD:
                used = self.actions[Action(move.target, Kind.FORWARD, move.microbatch)][0]
                if start < used:
                    changes[move.target] += [(start, 1), (used, -1)]
        return tuple(_highest(each) for each in changes)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no order of the same actions, and no choice of senders, can go below."""
        graph = self.lowered.graph
        wanted = deliveries(self.schedule, graph, validate(self.schedule, graph))
        return lower_bound(self.schedule, graph, self.costs, wanted)

    @cached_property
    def timeline(self) -> Timeline:
        """Lanes `rank r/compute`, `rank r/out` and `rank r/in`; events are named by action or transfer."""
        return Timeline(self._events(), name=f"{self.schedule.name}, {self.transfers.value}")

    def _events(self) -> Iterator[Event]:
        for action, (start, end) in self.actions.items():
            yield Event(f"rank {self.schedule.rank_of(action.stage)}/compute", "compute", str(action), start, end)
        for move, (start, end) in self.moves.items():
            yield Event(f"rank {self.schedule.rank_of(move.source)}/out", "send", str(move), start, end)
            yield Event(f"rank {self.schedule.rank_of(move.target)}/in", "recv", str(move), start, end)

    def __str__(self) -> str:
        return (
            f"{self.schedule.name}, {self.transfers.value}: step {format_seconds(self.seconds)}, bound "
            f"{format_seconds(self.lower_bound)}, bubble {self.bubble:.1%}, "
            f"peak activations {' '.join(map(str, self.peak_activations))}"
        )


def simulate(
    schedule: Schedule,
    costs: Costs,
    graph: StageGraph | None = None,
    *,
    transfers: Transfers = Transfers.OVERLAPPED,
) -> Simulation:
    """Lowers the schedule for these costs and runs it on a clock; a plain chain without a graph.

    >>> from weft.pipeline import schedule
    >>> costs = Costs.uniform(4, transfer=0.5)
    >>> for name in ("1f1b", "eager-1f1b"):
    ...     print(simulate(schedule(name, stages=4, microbatches=16), costs))
    1f1b, overlapped: step 71.0 s, bound 60.0 s, bubble 32.4%, peak activations 4 3 2 1
    eager-1f1b, overlapped: step 60.0 s, bound 60.0 s, bubble 20.0%, peak activations 7 5 3 1
    """
    decision = decide(schedule, chain(schedule.stages) if graph is None else graph, costs)
    lowered = insert(decision, transfers)
    if transfers is Transfers.OVERLAPPED:
        return _simulation(lowered, costs, transfers, decision.run)
    return simulate_lowered(lowered, costs, transfers=transfers)


def simulate_lowered(lowered: Lowered, costs: Costs, *, transfers: Transfers = Transfers.OVERLAPPED) -> Simulation:
    """Runs what has been lowered, also for other costs, on a clock; senders stay as they are."""
    schedule = lowered.schedule
    wanted = deliveries(schedule, lowered.graph, validate(schedule, lowered.graph))
    source_of = {_key(t): t.source for t in lowered.transfers}
    routes = [source_of[_key(each.sent_by(-1))] if _is_forward(each) else each.sources[0] for each in wanted]
    postings = None if transfers is Transfers.OVERLAPPED else _postings(lowered, wanted, routes)
    run = Engine(schedule, lowered.graph, costs, wanted, routes=routes, postings=postings).run()
    return _simulation(lowered, costs, transfers, run)


def _simulation(lowered: Lowered, costs: Costs, transfers: Transfers, run: Run) -> Simulation:
    moves = {transfer: (start, end) for transfer, _, start, end in run.transfers}
    return Simulation(lowered, costs, transfers, run.actions, moves)


def _is_forward(each: Delivery) -> bool:
    return each.direction is Direction.FORWARD


def _key(transfer: Transfer) -> tuple[int, str, int, int]:
    return (transfer.producer, transfer.tensor, transfer.microbatch, transfer.target)


def _postings(lowered: Lowered, wanted: list[Delivery], routes: list[int]) -> list[Posting]:
    """After how many actions of its rank each send and receive stands in the lists."""
    sends: dict[Transfer, int] = {}
    receives: dict[Transfer, int] = {}
    for operations in lowered.ranks:
        done = 0
        for operation in operations:
            if isinstance(operation, Send):
                sends[operation.transfer] = done
            elif isinstance(operation, Receive):
                receives[operation.transfer] = done
            else:
                done += 1
    moves = [each.sent_by(source) for each, source in zip(wanted, routes, strict=True)]
    return [Posting(sends[move], receives[move]) for move in moves]


def _highest(changes: list[tuple[float, int]]) -> int:
    """The highest sum of changes over time; at one instant what leaves goes first."""
    level = highest = 0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
