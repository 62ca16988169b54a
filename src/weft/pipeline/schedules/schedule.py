"""A schedule: what each rank computes, in which order. A value, its checks, and its text: a grid, and torch's CSV.

The grid has a row for each step and a column for each rank. torch's CSV has a line for each rank and an action in each
cell; its files may also hold empty cells, communication and FSDP's steps, which are passed over: weft inserts its own
transfers. A forward and a backward that torch runs as one (`(0F1;1B0)OVERLAP_F_B`) become two actions.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from weft.pipeline.schedules.graph import Action, Dependencies, Kind, StageGraph, Steps, chain, run_in_steps

if TYPE_CHECKING:
    from weft.pipeline.schedules.costs import Costs, Transfers
    from weft.pipeline.schedules.simulate import Simulation

_EMPTY = "."
_STEPS_BEFORE_STUCK = 8  # of the grid in the message of a deadlock
_HEAD = re.compile(r"schedule (\S+): ([0-9]+) stages, ([0-9]+) micro-batches, ([0-9]+) ranks", re.ASCII)
_NOT_COMPUTE = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*", re.ASCII)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """One list of actions for each rank; every stage lives on one rank, a rank may hold several stages.

    Every stage has for every micro-batch one forward and one backward: either B, or I and later W. A schedule
    without any backward is one for evaluation (`forward_only`). All that is checked here, and that nothing is
    missing or doubled. Whether ranks can wait for each other in a circle depends on the stage graph too, and is
    checked by `validate`, which `lower` and `simulate` call.

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

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action of the stage that makes the gradient of its input."""
        split = self.splits_backward(stage, microbatch)
        return Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, microbatch)

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
        """What a run is expected to do: timeline, step time, bubble and peak; see `Simulation`."""
        # Here, since predictions are built on schedules: this method is a user's shortcut to them.
        from weft.pipeline.schedules.costs import Transfers
        from weft.pipeline.schedules.simulate import simulate

        return simulate(self, costs, graph, transfers=transfers or Transfers.OVERLAPPED)

    def steps(self, graph: StageGraph | None = None) -> Steps:
        """When each action runs if each takes one step, as far as it goes; a plain chain without a graph."""
        return run_in_steps(self.ranks, _graph_of(self, graph))

    def __str__(self) -> str:
        """The head and the grid; a cell stands in the step at which it can run if every action takes one step."""
        sizes = f"{self.stages} stages, {self.microbatches} micro-batches, {len(self.ranks)} ranks"
        return "\n".join([f"schedule {self.name}: {sizes}", *_lines(_rows(self, self.steps()), first=0)])

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.stages} stages, {self.microbatches} micro-batches, {len(self.ranks)} ranks>"
        )

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that prints as `text`; where cells stand does not matter, only their order in each column."""
        lines = [line for line in text.splitlines() if line.strip()]
        match = _HEAD.fullmatch(lines[0].strip()) if lines else None
        if match is None or len(lines) < 2:
            raise ValueError(
                f"got the schedule {text[:80]!r}; expected 'schedule NAME: 2 stages, 4 micro-batches, 2 ranks', a line "
                f"with the ranks, and a line for each step"
            )
        count = int(match[4])
        columns: list[list[Action]] = [[] for _ in range(count)]
        for line in lines[2:]:
            cells = line.split()[1:]
            if len(cells) != count:
                raise ValueError(
                    f"got the line {line!r} with {len(cells)} cells; expected {count}, '.' for an empty one"
                )
            for column, cell in zip(columns, cells, strict=True):
                if cell != _EMPTY:
                    column.append(Action.parse(cell))
        return cls(match[1], int(match[2]), int(match[3]), tuple(map(tuple, columns)))


def validate(schedule: Schedule, graph: StageGraph | None = None) -> Steps:
    """Raises if some rank would wait for ever; the message is the grid with the stuck cells in brackets.

    Missing, doubled and misplaced actions are refused by `Schedule` itself.

    >>> lists = ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"]
    >>> stuck = Schedule("mine", 2, 2, tuple(tuple(map(Action.parse, actions.split())) for actions in lists))
    >>> validate(stuck)
    Traceback (most recent call last):
    ...
    ValueError: schedule mine cannot finish: ranks wait for each other in a circle
    step  rank 0  rank 1
       0     0F0       .
       1   [0B0]   [1F1]
    rank 0 is stuck at 0B0, which needs 1B0: that comes 4th on rank 1
    rank 1 is stuck at 1F1, which needs 0F1: that comes 3rd on rank 0
    expected an order in which every action comes after those it needs; move those of a stuck rank
    """
    graph = _graph_of(schedule, graph)
    steps = run_in_steps(schedule.ranks, graph)
    if steps.stuck:
        dependencies = Dependencies(schedule.ranks, graph)
        needs = {
            rank: [needed for needed in dependencies.of(action) if needed not in steps.of]
            for rank, action in steps.stuck.items()
        }
        raise ValueError(_format_stuck(schedule, steps, needs))
    return steps


def _graph_of(schedule: Schedule, graph: StageGraph | None) -> StageGraph:
    if graph is None:
        return chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise ValueError(
            f"got a graph of {graph.stages} stages for a schedule of {schedule.stages}; expected the same number"
        )
    return graph


def to_torch_csv(schedule: Schedule) -> str:
    """The text that torch's schedule runtime loads as `compute_only`.

    >>> from weft.pipeline import schedule
    >>> print(to_torch_csv(schedule("1f1b", stages=2, microbatches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(schedule.ranks)
    return file.getvalue()


def from_torch_csv(text: str, *, name: str = "imported") -> Schedule:
    """The schedule of such a text, with or without communication.

    >>> from_torch_csv("0F0,,0B0\\n0RECV_F0,1F0,1B0\\n").ranks
    ((0F0, 0B0), (1F0, 1B0))
    """
    ranks: list[list[Action]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            ranks.append([action for cell in row for action in _actions(cell.strip())])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    every = [action for actions in ranks for action in actions]
    if not every:
        raise ValueError(f"got the CSV {text[:80]!r} without actions; expected a line for each rank, such as 0F0,0B0")
    stages = max(action.stage for action in every) + 1
    microbatches = max(action.microbatch for action in every) + 1
    return Schedule(name, stages, microbatches, tuple(map(tuple, ranks)))


def _actions(cell: str) -> list[Action]:
    together = _TOGETHER.fullmatch(cell)
    if together is not None:
        return [Action.parse(part.strip()) for part in together[1].split(";")]
    return [] if not cell or _NOT_COMPUTE.fullmatch(cell) else [Action.parse(cell)]


def _format_stuck(schedule: Schedule, steps: Steps, needs: Mapping[int, Sequence[Action]]) -> str:
    """What happened up to a deadlock, the stuck cells in brackets, and what each of them waits for."""
    rows = _rows(schedule, steps)[: steps.count]
    ranks = range(len(schedule.ranks))
    rows.append([f"[{steps.stuck[r]}]" if r in steps.stuck else _EMPTY for r in ranks])
    first = max(0, len(rows) - 1 - _STEPS_BEFORE_STUCK)
    lines = [f"schedule {schedule.name} cannot finish: ranks wait for each other in a circle"]
    lines += _lines(rows[first:], first=first)
    for rank, action in steps.stuck.items():
        for needed in needs[rank]:
            holder = schedule.rank_of(needed.stage)
            place = schedule.ranks[holder].index(needed) + 1
            lines.append(
                f"rank {rank} is stuck at {action}, which needs {needed}: that comes {_ordinal(place)} on rank {holder}"
            )
    lines.append("expected an order in which every action comes after those it needs; move those of a stuck rank")
    return "\n".join(lines)


def _rows(schedule: Schedule, steps: Steps) -> list[list[str]]:
    """The cells by step and rank; what cannot run comes below all that can, in its order."""
    columns: list[dict[int, str]] = []
    for actions in schedule.ranks:
        able = {steps.of[action]: str(action) for action in actions if action in steps.of}
        unable = [str(action) for action in actions if action not in steps.of]
        columns.append(able | dict(enumerate(unable, start=steps.count)))
    height = max(max(column, default=-1) for column in columns) + 1
    return [[column.get(step, _EMPTY) for column in columns] for step in range(height)]


def _lines(rows: Sequence[Sequence[str]], *, first: int) -> list[str]:
    """The grid with its steps and ranks; all columns are as wide as the widest cell."""
    heads = [f"rank {rank}" for rank in range(len(rows[0]))]
    width = max(len(cell) for row in [heads, *rows] for cell in row)
    label = max(4, len(str(first + len(rows) - 1)))
    table = [("step", heads), *((str(first + i), row) for i, row in enumerate(rows))]
    return [f"{step:>{label}}  " + "  ".join(f"{cell:>{width}}" for cell in row) for step, row in table]


def _ordinal(number: int) -> str:
    """
    >>> [_ordinal(n) for n in (1, 2, 3, 4, 11, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd']
    """
    special = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else special.get(number % 10, 'th')}"


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
