"""One thing that a stage does with one micro-batch.

A schedule: what each rank computes, in which order. Only a value; generators are in `schedules`.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.pipeline.predict.costs import Costs, Transfers
    from weft.pipeline.predict.simulate import Simulation
    from weft.pipeline.schedules.graph import StageGraph

_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)", re.ASCII)


@functools.total_ordering
class Kind(enum.Enum):
    """What is computed; sorts in the order in which a micro-batch needs it."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    __hash__ = object.__hash__  # by identity: members are single, and Enum's own hash is slow

    def __lt__(self, other: Kind) -> bool:
        return _RANKING[self] < _RANKING[other]

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch is kept on the stage once this is done."""
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


_RANKING = {kind: i for i, kind in enumerate(Kind)}
_DOES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "gradient of the input",
    Kind.WEIGHT_GRADIENT: "gradient of the weights",
}


@dataclass(frozen=True, order=True)
class Action:
    """Stage, kind and micro-batch; prints as `2F0` and parses back.

    >>> Action(2, Kind.FORWARD, 0)
    2F0
    >>> Action.parse("3B11").microbatch
    11
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"got stage {self.stage} and micro-batch {self.microbatch}; expected both to be 0 or more")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    def in_words(self) -> str:
        """For errors.

        >>> Action(2, Kind.FORWARD, 0).in_words()
        '2F0 (stage 2, forward, micro-batch 0)'
        """
        return f"{self} (stage {self.stage}, {_DOES[self.kind]}, micro-batch {self.microbatch})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"got the action {text!r}; expected stage, F, B, I or W, and micro-batch, such as 2F0: "
                f"forward, full backward, gradient of the input, gradient of the weights"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """One list of actions for each rank; every stage lives on one rank, a rank may hold several stages.

    Every stage has for every micro-batch one forward and one backward: either B, or I and later W. A schedule
    without any backward is one for evaluation (`forward_only`). All that is checked here, and that nothing is
    missing or doubled. Whether ranks can wait for each other in a circle depends on the stage graph too, and is
    checked by `weft.pipeline.schedules.text`, which `lower` and `simulate` call.

    name:         one word
    stages:       how many; they count from 0
    microbatches: how many; they count from 0
    ranks:        what each rank computes, in order

    >>> lists = (["0F0", "0B0"], ["1F0", "1B0"])
    >>> tiny = Schedule("mine", 2, 1, tuple(tuple(map(Action.parse, actions)) for actions in lists))
    >>> print(tiny)
    schedule mine: 2 stages, 1 micro-batches, 2 ranks
    step  rank 0  rank 1
       0     0F0       .
       1       .     1F0
       2       .     1B0
       3     0B0       .
    >>> Schedule.parse(str(tiny)) == tiny
    True
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(actions) for actions in self.ranks))
        _check(self)

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def rank_of(self, stage: int) -> int:
        """The rank that holds the stage: the index of the list with its actions."""
        if stage not in self._rank_of:
            raise ValueError(f"got stage {stage}; expected one of 0 to {self.stages - 1}")
        return self._rank_of[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank holds, in order."""
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"got rank {rank}; expected one of 0 to {len(self.ranks) - 1}")
        return tuple(stage for stage in range(self.stages) if self._rank_of[stage] == rank)

    @cached_property
    def has_backward(self) -> bool:
        """False for a schedule of forwards only."""
        return any(action.kind is not Kind.FORWARD for actions in self.ranks for action in actions)

    def splits_backward(self, stage: int, microbatch: int) -> bool:
        """Whether this backward is I and W, not B."""
        return (stage, microbatch) in self._split

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        actions = (action for rank in self.ranks for action in rank)
        return frozenset((a.stage, a.microbatch) for a in actions if a.kind is Kind.INPUT_GRADIENT)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most micro-batches that each stage keeps activations of at once, from their F to their B or W.

        It follows from the order alone, so a run cannot keep more or fewer. Without a backward it is 1.
        """
        return tuple(self._peak(self.ranks[self.rank_of(stage)], {stage}) for stage in range(self.stages))

    @cached_property
    def peak_by_rank(self) -> tuple[int, ...]:
        """The same for all stages of each rank together: pairs of a stage and a micro-batch."""
        return tuple(self._peak(actions, set(self.stages_of(rank))) for rank, actions in enumerate(self.ranks))

    def _peak(self, actions: Sequence[Action], stages: set[int]) -> int:
        live = peak = 0
        for action in actions:
            if action.stage in stages:
                live += action.kind is Kind.FORWARD
                peak = max(peak, live)
                live -= action.kind.frees_activations or not self.has_backward
        return peak

    def forward_only(self) -> Schedule:
        """The forwards alone, in the same order: a schedule for evaluation.

        >>> from weft.pipeline import schedule
        >>> schedule("1f1b", stages=2, microbatches=2).forward_only().ranks
        ((0F0, 0F1), (1F0, 1F1))
        """
        ranks = (tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in self.ranks)
        return Schedule(f"{self.name}:forward", self.stages, self.microbatches, tuple(ranks))

    def simulate(
        self, costs: Costs, graph: StageGraph | None = None, *, transfers: Transfers | None = None
    ) -> Simulation:
        """What a run is expected to do: timeline, step time, bubble and peak; see `weft.pipeline.predict.simulate`."""
        from weft.pipeline.predict.costs import Transfers
        from weft.pipeline.predict.simulate import simulate

        return simulate(self, costs, graph, transfers=transfers or Transfers.OVERLAPPED)

    def __str__(self) -> str:
        from weft.pipeline.schedules.text import format_schedule

        return format_schedule(self)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.stages} stages, {self.microbatches} micro-batches, {len(self.ranks)} ranks>"
        )

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that prints as `text`."""
        from weft.pipeline.schedules.text import parse_schedule

        return parse_schedule(text)


def _check(schedule: Schedule) -> None:
    """Refuses a schedule with an action that is missing, doubled or impossible whatever the others do."""
    if not re.fullmatch(r"[\w.+:-]+", schedule.name):
        raise ValueError(f"got the name {schedule.name!r}; expected one word of letters, digits and . + : - _")
    if schedule.stages < 1 or schedule.microbatches < 1:
        raise ValueError(
            f"got {schedule.stages} stages and {schedule.microbatches} micro-batches; expected at least 1 of each"
        )
    holder: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise ValueError(f"rank {rank} has no actions; expected every rank to hold a stage; use fewer ranks")
        for action in actions:
            if action.stage >= schedule.stages or action.microbatch >= schedule.microbatches:
                raise ValueError(
                    f"got {action} on rank {rank}; expected stages 0 to {schedule.stages - 1} and micro-batches "
                    f"0 to {schedule.microbatches - 1}"
                )
            if holder.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"got {action} on rank {rank}, but stage {action.stage} is on rank {holder[action.stage]}; "
                    f"expected all actions of a stage on one rank"
                )
            _check_next(action, seen, rank)
            seen.add(action)
    _check_missing(schedule, seen)


def _check_next(action: Action, seen: set[Action], rank: int) -> None:
    """Whether the action may follow those that the rank has done; all that it touches is on its rank."""
    if action in seen:
        raise ValueError(f"got {action} twice on rank {rank}; expected every action once")

    def same(kind: Kind) -> Action:
        return Action(action.stage, kind, action.microbatch)

    if action.kind is Kind.FORWARD:
        return
    if same(Kind.FORWARD) not in seen:
        raise ValueError(f"got {action} before {same(Kind.FORWARD)} on rank {rank}; expected the forward first")
    split = (same(Kind.INPUT_GRADIENT), same(Kind.WEIGHT_GRADIENT))
    clashing = split if action.kind is Kind.BACKWARD else (same(Kind.BACKWARD),)
    for other in clashing:
        if other in seen:
            raise ValueError(f"got {action} and {other} on rank {rank}; expected either B, or I and W")
    if action.kind is Kind.WEIGHT_GRADIENT and same(Kind.INPUT_GRADIENT) not in seen:
        raise ValueError(
            f"got {action} before {same(Kind.INPUT_GRADIENT)} on rank {rank}; expected the input's gradient first"
        )


def _check_missing(schedule: Schedule, seen: set[Action]) -> None:
    has_backward = any(action.kind is not Kind.FORWARD for action in seen)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            actions = [Action(stage, kind, microbatch) for kind in Kind]
            forward, backward, input_gradient, weight_gradient = (action in seen for action in actions)
            if not forward:
                raise ValueError(_missing(actions[:1]))
            if has_backward and not backward and not weight_gradient:
                raise ValueError(_missing(actions[3:] if input_gradient else actions[1:2]))


def _missing(actions: Sequence[Action]) -> str:
    return f"{actions[0]} is missing; expected for every stage and micro-batch F and either B, or I and W"
