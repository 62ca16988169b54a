"""What a step is made of: the seconds of each action and transfer, and which tensors must get from rank to rank."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from weft.pipeline.schedules.graph import Action, Edge, Kind, StageGraph, Steps
from weft.pipeline.schedules.lowered import Direction, TensorTransfer
from weft.pipeline.schedules.schedule import Schedule

if TYPE_CHECKING:
    from weft.reshard import Plan


class Transfers(enum.Enum):
    """How transfers go with computing."""

    OVERLAPPED = "overlapped"  # beside it: they start once the tensor exists and the cards are free
    SYNCHRONOUS = "synchronous"  # instead of it: both ranks wait, as with send and recv in the training loop


@dataclass(frozen=True)
class Costs:
    """Seconds of every action and every transfer, and which cards the stages send through.

    A card sends one tensor and receives one tensor at a time. `Costs.uniform` and `Costs.from_plans` make one.

    forward, backward, input_gradient, weight_gradient: of F, B, I and W on each stage
    transfer:          of each edge, or one number for all
    gradient_transfer: the same for the way back; as `transfer` where it is None
    cards:             the hosts of each stage's mesh; None for a card of its own for each rank
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: Mapping[Edge, float] | float = 0.0
    gradient_transfer: Mapping[Edge, float] | float | None = None
    cards: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "input_gradient", "weight_gradient"):
            values = tuple(float(x) for x in getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) != self.stages or not all(math.isfinite(x) and x > 0 for x in values):
                raise ValueError(f"{name} is {values}; expected a finite number of seconds above 0 for each stage")
        for name in ("transfer", "gradient_transfer"):
            given = getattr(self, name)
            for seconds in given.values() if isinstance(given, Mapping) else (given,):
                if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
                    raise ValueError(f"{name} has {seconds}; expected finite seconds, 0 or more")
        if self.cards is not None and (len(self.cards) != self.stages or not all(self.cards)):
            raise ValueError(f"cards is {self.cards}; expected the hosts of each of the {self.stages} stages")

    @classmethod
    def uniform(cls, stages: int, *, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0) -> Costs:
        """Equal stages and transfers; a backward is half the input's and half the weights' gradient.

        >>> Costs.uniform(2, transfer=0.5).of(Action.parse("1B0"))
        2.0
        """
        half = (backward / 2,) * stages
        return cls((forward,) * stages, (backward,) * stages, half, half, transfer)

    @classmethod
    def from_plans(
        cls,
        *,
        forward: Sequence[float],
        input_gradient: Sequence[float],
        weight_gradient: Sequence[float],
        plans: Mapping[Edge, Plan],
        gradient_plans: Mapping[Edge, Plan] | None = None,
    ) -> Costs:
        """Stages as measured, transfers as their reshard plans predict on the plans' cluster.

        Cards are those of the plans' meshes: stages that share a host share its card. Without `gradient_plans` a
        gradient takes as long as its tensor.
        """
        stages = len(forward)
        hosts: list[set[int]] = [set() for _ in range(stages)]
        for edge, plan in plans.items():
            for tensor in plan.tensors:
                hosts[edge.source].update(tensor.src.mesh.hosts)
                hosts[edge.target].update(tensor.dst.mesh.hosts)
        lonely = [stage for stage in range(stages) if not hosts[stage]]
        if lonely and stages > 1:
            raise ValueError(f"got no plan of an edge to or from stage {lonely[0]}; expected one for each edge")
        return cls(
            tuple(forward),
            tuple(i + w for i, w in zip(input_gradient, weight_gradient, strict=True)),
            tuple(input_gradient),
            tuple(weight_gradient),
            {edge: plan.seconds for edge, plan in plans.items()},
            None if gradient_plans is None else {edge: plan.seconds for edge, plan in gradient_plans.items()},
            None if lonely else tuple(tuple(sorted(own)) for own in hosts),
        )

    @property
    def stages(self) -> int:
        """How many stages they are for."""
        return len(self.forward)

    @cached_property
    def _by_kind(self) -> dict[Kind, tuple[float, ...]]:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
        }

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        return self._by_kind[action.kind][action.stage]

    def of_transfer(self, edge: Edge, direction: Direction) -> float:
        """Seconds of the edge's tensor, or of its gradient, between two ranks."""
        backwards = direction is Direction.GRADIENT and self.gradient_transfer is not None
        given = self.gradient_transfer if backwards else self.transfer
        if not isinstance(given, Mapping):
            assert given is not None
            return float(given)
        if edge not in given:
            raise ValueError(f"got no {direction.value} seconds for the edge {edge}; expected one for each edge")
        return given[edge]

    def cards_of(self, stage: int, schedule: Schedule) -> tuple[int, ...]:
        """The cards that the stage sends and receives through."""
        return (schedule.rank_of(stage),) if self.cards is None else self.cards[stage]


@dataclass(frozen=True)
class TransferNeed:
    """A tensor, or a gradient, that a rank needs from another one; who sends it is not decided.

    edge:       of the stage graph; its source made the tensor
    microbatch: of which micro-batch
    direction:  the tensor to the edge's target, or the gradient to its source
    made_by:    the action that makes it
    sources:    the stages that may send it, the maker first; others once they have got it
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

    def sent_by(self, source: int) -> TensorTransfer:
        """The transfer, once it is known who sends."""
        return TensorTransfer(self.edge.source, self.edge.tensor, self.microbatch, source, self.target)


def transfer_needs(schedule: Schedule, graph: StageGraph, steps: Steps) -> list[TransferNeed]:
    """What must get from rank to rank, the most urgent first.

    A tensor goes to each rank once: to the stage there that uses it first. A gradient comes back from each stage
    that used the tensor, also if two are on one rank, so that the sum is always taken in the order of stages.
    """
    found: list[TransferNeed] = []
    for microbatch in range(schedule.microbatches):
        found += _forwards(schedule, graph, steps, microbatch)
        if schedule.has_backward:
            found += _gradients(schedule, graph, steps, microbatch)
    return sorted(found, key=lambda each: each.urgency)


def _forwards(schedule: Schedule, graph: StageGraph, steps: Steps, microbatch: int) -> Iterator[TransferNeed]:
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
        yield TransferNeed(edge, microbatch, Direction.FORWARD, made_by, sources, made_in, needed_in)


def _gradients(schedule: Schedule, graph: StageGraph, steps: Steps, microbatch: int) -> Iterator[TransferNeed]:
    for edge in graph.edges:
        if edge.gradient and schedule.rank_of(edge.source) != schedule.rank_of(edge.target):
            made_by = schedule.gradient(edge.target, microbatch)
            needed_in = steps.of[schedule.gradient(edge.source, microbatch)]
            made_in = steps.of[made_by] + 1
            yield TransferNeed(edge, microbatch, Direction.GRADIENT, made_by, (edge.target,), made_in, needed_in)
