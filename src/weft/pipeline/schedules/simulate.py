"""What a step is expected to do: its timeline, its length, its bubble, its memory; and what no order can beat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.schedules.costs import Costs, TransferNeed, Transfers, transfer_needs
from weft.pipeline.schedules.graph import Action, Edge, Kind, StageGraph, chain
from weft.pipeline.schedules.lower import Clock, ClockRun, Position, decide, insert
from weft.pipeline.schedules.lowered import Direction, Lowered, Receive, Send, TensorTransfer
from weft.pipeline.schedules.schedule import Schedule, validate
from weft.timeline import Event, Timeline
from weft.timeline.text import format_seconds


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
    wanted = transfer_needs(schedule, lowered.graph, validate(schedule, lowered.graph))
    source_of = {_key(t): t.source for t in lowered.transfers}
    senders = [source_of[_key(each.sent_by(-1))] if _is_forward(each) else each.sources[0] for each in wanted]
    positions = None if transfers is Transfers.OVERLAPPED else _positions(lowered, wanted, senders)
    run = Clock(schedule, lowered.graph, costs, wanted, senders=senders, positions=positions).run()
    return _simulation(lowered, costs, transfers, run)


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
    moves: dict[TensorTransfer, tuple[float, float]]

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
        wanted = transfer_needs(self.schedule, graph, validate(self.schedule, graph))
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


def lower_bound(schedule: Schedule, graph: StageGraph, costs: Costs, needs: Sequence[TransferNeed]) -> float:
    """Seconds that no step goes below with the same actions on the same ranks.

    Three things take their time whatever the order is: one micro-batch through all stages and back; each rank's work,
    with the path of the first micro-batch to it before and that of the last gradient from it after; what each card
    must carry, with the same paths. The bound is the longest of them.
    """
    paths = _Paths(schedule, graph, costs)
    bounds = [paths.before[s] + costs.forward[s] + paths.after_forward[s] for s in range(graph.stages)]
    for rank, actions in enumerate(schedule.ranks):
        stages = schedule.stages_of(rank)
        head = min(paths.before[s] for s in stages)
        every = sum(costs.of(action) for action in actions)
        # W may wait until nobody needs anything more of the rank, so only the rest is followed by a path.
        until_gradient = sum(costs.of(action) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT)
        tail = min(paths.after_gradient[s] for s in stages)
        bounds += [head + every, head + until_gradient + tail]
    return max(*bounds, *_card_bounds(schedule, costs, paths, needs))


class _Paths:
    """The longest paths through the graph for one micro-batch, transfers between ranks included, by stage.

    before:         from the start to the stage's forward
    after_forward:  from the end of its forward to the end of all that must follow
    after_gradient: from the end of its I or B to the end of all that must follow
    gradient:       its I or B, the shorter where micro-batches differ
    """

    def __init__(self, schedule: Schedule, graph: StageGraph, costs: Costs) -> None:
        self._schedule, self._graph, self._costs = schedule, graph, costs
        stages = range(graph.stages)
        splits = [{schedule.splits_backward(s, m) for m in range(schedule.microbatches)} for s in stages]
        self.gradient = [min(_gradient_seconds(costs, s, split) for split in splits[s]) for s in stages]
        rest = [0.0 if False in splits[s] else costs.weight_gradient[s] for s in stages]
        self.before = [0.0] * graph.stages
        self.after_gradient = [0.0] * graph.stages
        for s in stages:
            into = graph.into(s)
            self.before[s] = _longest(
                self.before[e.source] + costs.forward[e.source] + self._transfer(e, Direction.FORWARD) for e in into
            )
            if schedule.has_backward:
                paths = (
                    self._transfer(e, Direction.GRADIENT) + self.gradient[e.source] + self.after_gradient[e.source]
                    for e in into
                    if e.gradient
                )
                self.after_gradient[s] = max(rest[s], _longest(paths))
        self.after_forward = [0.0] * graph.stages
        for s in reversed(stages):
            paths = (
                self._transfer(e, Direction.FORWARD) + costs.forward[e.target] + self.after_forward[e.target]
                for e in graph.out_of(s)
            )
            own = self.gradient[s] + self.after_gradient[s] if schedule.has_backward else 0.0
            self.after_forward[s] = max(own, _longest(paths))

    def _transfer(self, edge: Edge, direction: Direction) -> float:
        """The transfer of an edge; a tensor goes to a rank once, perhaps for another of its stages."""
        rank = self._schedule.rank_of(edge.target)
        if self._schedule.rank_of(edge.source) == rank:
            return 0.0
        if direction is Direction.GRADIENT:
            return self._costs.of_transfer(edge, direction)
        same = (e for e in self._graph.out_of(edge.source) if e.tensor == edge.tensor)
        return min(self._costs.of_transfer(e, direction) for e in same if self._schedule.rank_of(e.target) == rank)


def _gradient_seconds(costs: Costs, stage: int, split: bool) -> float:
    return costs.of(Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, 0))


def _longest(paths: Iterable[float]) -> float:
    return max(paths, default=0.0)


def _card_bounds(schedule: Schedule, costs: Costs, paths: _Paths, needs: Sequence[TransferNeed]) -> list[float]:
    """For each direction of each card: the earliest start, all that it must carry, the least that must follow."""
    loads: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for each in needs:
        into = costs.cards_of(each.target, schedule)
        outs = [costs.cards_of(source, schedule) for source in each.sources]
        if any(out == into and len(out) == 1 for out in outs):
            continue  # may stay inside a host
        maker = each.made_by.stage
        start = paths.before[maker] + costs.forward[maker]
        if each.direction is Direction.FORWARD:
            rest = costs.forward[each.target] + paths.after_forward[each.target]
        else:
            start += paths.gradient[maker]
            rest = paths.gradient[each.target] + paths.after_gradient[each.target]
        load = (start, costs.of_transfer(each.edge, each.direction), rest)
        for card in into:
            loads["in", card].append(load)
        for card in outs[0] if len(outs) == 1 else ():
            loads["out", card].append(load)
    bounds = []
    for load_of_card in loads.values():
        starts, seconds, rests = zip(*load_of_card, strict=True)
        bounds.append(min(starts) + sum(seconds) + min(rests))
    return bounds


def _simulation(lowered: Lowered, costs: Costs, transfers: Transfers, run: ClockRun) -> Simulation:
    moves = {transfer: (start, end) for transfer, _, start, end in run.transfers}
    return Simulation(lowered, costs, transfers, run.actions, moves)


def _is_forward(each: TransferNeed) -> bool:
    return each.direction is Direction.FORWARD


def _key(transfer: TensorTransfer) -> tuple[int, str, int, int]:
    return (transfer.producer, transfer.tensor, transfer.microbatch, transfer.target)


def _positions(lowered: Lowered, wanted: list[TransferNeed], senders: list[int]) -> list[Position]:
    """After how many actions of its rank each send and receive stands in the lists."""
    sends: dict[TensorTransfer, int] = {}
    receives: dict[TensorTransfer, int] = {}
    for operations in lowered.ranks:
        done = 0
        for operation in operations:
            if isinstance(operation, Send):
                sends[operation.transfer] = done
            elif isinstance(operation, Receive):
                receives[operation.transfer] = done
            else:
                done += 1
    moves = [each.sent_by(source) for each, source in zip(wanted, senders, strict=True)]
    return [Position(sends[move], receives[move]) for move in moves]


def _highest(changes: list[tuple[float, int]]) -> int:
    """The highest sum of changes over time; at one instant what leaves goes first."""
    level = highest = 0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
