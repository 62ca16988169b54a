"""Schedules as text: a row for each step, a column for each rank, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weft.pipeline.action import Action
from weft.pipeline.schedule import Schedule
from weft.pipeline.validate import Steps, run_in_steps

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
