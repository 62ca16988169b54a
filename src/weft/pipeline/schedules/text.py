"""Schedules as text: a row for each step, a column for each rank, and back.

Schedules to and from the CSV of torch.distributed.pipelining: a line for each rank, an action in each cell.

torch's files may also hold empty cells, communication and FSDP's steps, which are passed over: weft inserts its
own transfers. A forward and a backward that torch runs as one (`(0F1;1B0)OVERLAP_F_B`) become two actions.

Whether ranks could wait for each other in a circle, found by running the schedule in steps of equal length.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.schedules.graph import StageGraph, chain
from weft.pipeline.schedules.schedule import Action, Kind, Schedule

EMPTY = "."
STEPS_BEFORE_STUCK = 8  # of the grid in the message of a deadlock
_HEAD = re.compile(r"schedule (\S+): ([0-9]+) stages, ([0-9]+) micro-batches, ([0-9]+) ranks", re.ASCII)


def format_schedule(schedule: Schedule) -> str:
    """The head and the grid; a cell stands in the step at which it can run if every action takes one step."""
    head = (
        f"schedule {schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches, "
        f"{len(schedule.ranks)} ranks"
    )
    return "\n".join([head, *_lines(_rows(schedule, run_in_steps(schedule)), first=0)])


def parse_schedule(text: str) -> Schedule:
    """The schedule of a grid; where its cells stand does not matter, only their order in each column."""
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
            raise ValueError(f"got the line {line!r} with {len(cells)} cells; expected {count}, '.' for an empty one")
        for column, cell in zip(columns, cells, strict=True):
            if cell != EMPTY:
                column.append(Action.parse(cell))
    return Schedule(match[1], int(match[2]), int(match[3]), tuple(map(tuple, columns)))


def format_stuck(schedule: Schedule, steps: Steps, needs: Mapping[int, Sequence[Action]]) -> str:
    """What happened up to a deadlock, the stuck cells in brackets, and what each of them waits for."""
    rows = _rows(schedule, steps)[: steps.count]
    ranks = range(len(schedule.ranks))
    rows.append([f"[{steps.stuck[r]}]" if r in steps.stuck else EMPTY for r in ranks])
    first = max(0, len(rows) - 1 - STEPS_BEFORE_STUCK)
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
    return [[column.get(step, EMPTY) for column in columns] for step in range(height)]


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


_NOT_COMPUTE = re.compile(r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*", re.ASCII)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)


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


@dataclass(frozen=True)
class Steps:
    """When each action runs if each takes one step and transfers take none.

    of:    the step of each action that can run
    stuck: for each rank that cannot finish, the action that it is stuck at
    """

    of: dict[Action, int]
    stuck: dict[int, Action]

    @cached_property
    def count(self) -> int:
        """How many steps there are."""
        return max(self.of.values(), default=-1) + 1


class Dependencies:
    """What must have been done before an action, by schedule and stage graph."""

    def __init__(self, schedule: Schedule, graph: StageGraph) -> None:
        self._schedule = schedule
        self._sources = {s: sorted({e.source for e in graph.into(s)}) for s in range(graph.stages)}
        self._users = {s: sorted({e.target for e in graph.out_of(s) if e.gradient}) for s in range(graph.stages)}

    def of(self, action: Action) -> list[Action]:
        """The actions that this one needs: of its own stage and of its neighbours in the graph."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(source, Kind.FORWARD, microbatch) for source in self._sources[stage]]
        if action.kind is Kind.WEIGHT_GRADIENT:
            return [Action(stage, Kind.INPUT_GRADIENT, microbatch)]
        return [
            Action(stage, Kind.FORWARD, microbatch),
            *(self.gradient(user, microbatch) for user in self._users[stage]),
        ]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action of the stage that makes the gradient of its input."""
        split = self._schedule.splits_backward(stage, microbatch)
        return Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, microbatch)


def run_in_steps(schedule: Schedule, graph: StageGraph | None = None) -> Steps:
    """Runs the schedule in equal steps, as far as it goes; a plain chain without a graph."""
    dependencies = Dependencies(schedule, _graph_of(schedule, graph))
    done: dict[Action, int] = {}
    next_of = [0] * len(schedule.ranks)
    step = 0
    while True:
        ran = []
        for rank, actions in enumerate(schedule.ranks):
            if next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                if all(needed in done for needed in dependencies.of(action)):
                    ran.append((rank, action))
        if not ran:
            break
        for rank, action in ran:  # after the loop above, so that a step sees only what earlier steps have done
            done[action] = step
            next_of[rank] += 1
        step += 1
    stuck = {r: a[next_of[r]] for r, a in enumerate(schedule.ranks) if next_of[r] < len(a)}
    return Steps(done, stuck)


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
    steps = run_in_steps(schedule, graph)
    if steps.stuck:
        dependencies = Dependencies(schedule, graph)
        needs = {
            rank: [needed for needed in dependencies.of(action) if needed not in steps.of]
            for rank, action in steps.stuck.items()
        }
        raise ValueError(format_stuck(schedule, steps, needs))
    return steps


def _graph_of(schedule: Schedule, graph: StageGraph | None) -> StageGraph:
    if graph is None:
        return chain(schedule.stages)
    if graph.stages != schedule.stages:
        raise ValueError(
            f"got a graph of {graph.stages} stages for a schedule of {schedule.stages}; expected the same number"
        )
    return graph
