"""What no order of a schedule's actions can beat.

Three things take their time whatever the order is: one micro-batch through all stages and back; each rank's work,
with the way of the first micro-batch to it before and the way of the last gradient from it after; what each card
must carry, with the same ways. The bound is the longest of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from weft.pipeline.action import Action, Kind
from weft.pipeline.costs import Costs
from weft.pipeline.deliveries import Delivery
from weft.pipeline.graph import Edge, StageGraph
from weft.pipeline.lowered import Direction
from weft.pipeline.schedule import Schedule


def lower_bound(schedule: Schedule, graph: StageGraph, costs: Costs, deliveries: Sequence[Delivery]) -> float:
    """Seconds that no step goes below with the same actions on the same ranks."""
    ways = _Ways(schedule, graph, costs)
    bounds = [ways.before[s] + costs.forward[s] + ways.after_forward[s] for s in range(graph.stages)]
    for rank, actions in enumerate(schedule.ranks):
        stages = schedule.stages_of(rank)
        head = min(ways.before[s] for s in stages)
        every = sum(costs.of(action) for action in actions)
        # W may wait until nobody needs anything more of the rank, so only the rest is followed by a way.
        until_gradient = sum(costs.of(action) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT)
        tail = min(ways.after_gradient[s] for s in stages)
        bounds += [head + every, head + until_gradient + tail]
    return max(*bounds, *_card_bounds(schedule, costs, ways, deliveries))


class _Ways:
    """The longest ways through the graph for one micro-batch, transfers between ranks included, by stage.

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
                self.before[e.source] + costs.forward[e.source] + self._wire(e, Direction.FORWARD) for e in into
            )
            if schedule.has_backward:
                ways = (
                    self._wire(e, Direction.GRADIENT) + self.gradient[e.source] + self.after_gradient[e.source]
                    for e in into
                    if e.gradient
                )
                self.after_gradient[s] = max(rest[s], _longest(ways))
        self.after_forward = [0.0] * graph.stages
        for s in reversed(stages):
            ways = (
                self._wire(e, Direction.FORWARD) + costs.forward[e.target] + self.after_forward[e.target]
                for e in graph.out_of(s)
            )
            own = self.gradient[s] + self.after_gradient[s] if schedule.has_backward else 0.0
            self.after_forward[s] = max(own, _longest(ways))

    def _wire(self, edge: Edge, direction: Direction) -> float:
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


def _longest(ways: Iterable[float]) -> float:
    return max(ways, default=0.0)


def _card_bounds(schedule: Schedule, costs: Costs, ways: _Ways, deliveries: Sequence[Delivery]) -> list[float]:
    """For each direction of each card: the earliest start, all that it must carry, the least that must follow."""
    loads: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for each in deliveries:
        into = costs.cards_of(each.target, schedule)
        outs = [costs.cards_of(source, schedule) for source in each.sources]
        if any(out == into and len(out) == 1 for out in outs):
            continue  # may stay inside a host
        maker = each.made_by.stage
        start = ways.before[maker] + costs.forward[maker]
        if each.direction is Direction.FORWARD:
            rest = costs.forward[each.target] + ways.after_forward[each.target]
        else:
            start += ways.gradient[maker]
            rest = ways.gradient[each.target] + ways.after_gradient[each.target]
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
