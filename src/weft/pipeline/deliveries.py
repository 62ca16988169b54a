"""What must get from rank to rank for a schedule and a stage graph: each tensor once to each rank that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.pipeline.action import Action, Kind
from weft.pipeline.graph import Edge, StageGraph
from weft.pipeline.lowered import Direction, Transfer
from weft.pipeline.schedule import Schedule
from weft.pipeline.validate import Dependencies, Steps


@dataclass(frozen=True)
class Delivery:
    """A tensor, or a gradient, that a rank needs from another one.

    edge:       of the stage graph; its source made the tensor
    microbatch: of which micro-batch
    direction:  the tensor to the edge's target, or the gradient to its source
    made_by:    the action that makes it
    sources:    the stages that may send it, the maker first; others once it has been delivered to them
    made_in:    the step in which it exists (see `Steps`)
    needed_in:  the step in which it is first used
    """

    edge: Edge
    microbatch: int
    direction: Direction
    made_by: Action
    sources: tuple[int, ...]
    made_in: int
    needed_in: int

    @property
    def target(self) -> int:
        """The stage that needs it."""
        return self.edge.target if self.direction is Direction.FORWARD else self.edge.source

    @property
    def urgency(self) -> tuple[int, int, bool, Edge]:
        """Sorts what is needed first to the front; gradients before tensors, as others wait for them longer."""
        return (self.needed_in, self.made_in, self.direction is Direction.FORWARD, self.edge)

    def sent_by(self, source: int) -> Transfer:
        """The transfer, once it is known who sends."""
        return Transfer(self.edge.source, self.edge.tensor, self.microbatch, source, self.target)


def deliveries(schedule: Schedule, graph: StageGraph, steps: Steps) -> list[Delivery]:
    """All deliveries, the most urgent first.

    A tensor goes to each rank once: to the stage there that uses it first. A gradient comes back from each stage
    that used the tensor, also if two are on one rank, so that the sum is always taken in the order of stages.
    """
    found: list[Delivery] = []
    for microbatch in range(schedule.microbatches):
        found += _forwards(schedule, graph, steps, microbatch)
        if schedule.has_backward:
            found += _gradients(schedule, graph, steps, microbatch)
    return sorted(found, key=lambda each: each.urgency)


def _forwards(schedule: Schedule, graph: StageGraph, steps: Steps, microbatch: int) -> Iterator[Delivery]:
    def step(stage: int) -> int:
        return steps.of[Action(stage, Kind.FORWARD, microbatch)]

    first: dict[tuple[int, str, int], Edge] = {}  # the first use of each tensor on each rank
    for edge in sorted(graph.edges, key=lambda e: (step(e.target), e)):
        rank = schedule.rank_of(edge.target)
        if rank != schedule.rank_of(edge.source):
            first.setdefault((edge.source, edge.tensor, rank), edge)
    for edge in first.values():
        made_by = Action(edge.source, Kind.FORWARD, microbatch)
        users = (other.target for other in first.values() if (other.source, other.tensor) == (edge.source, edge.tensor))
        earlier = sorted(user for user in users if user < edge.target)
        sources = (edge.source, *earlier)
        made_in, needed_in = step(edge.source) + 1, step(edge.target)
        yield Delivery(edge, microbatch, Direction.FORWARD, made_by, sources, made_in, needed_in)


def _gradients(schedule: Schedule, graph: StageGraph, steps: Steps, microbatch: int) -> Iterator[Delivery]:
    dependencies = Dependencies(schedule, graph)
    for edge in graph.edges:
        if edge.gradient and schedule.rank_of(edge.source) != schedule.rank_of(edge.target):
            made_by = dependencies.gradient(edge.target, microbatch)
            needed_in = steps.of[dependencies.gradient(edge.source, microbatch)]
            made_in = steps.of[made_by] + 1
            yield Delivery(edge, microbatch, Direction.GRADIENT, made_by, (edge.target,), made_in, needed_in)
