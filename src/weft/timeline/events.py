"""`Event`: one thing that happened, or will happen, on one lane. And what a lane or a place was doing when.

That is told in sets of seconds. An interval is a pair `(start, end)`; a *set* is a sorted list of disjoint intervals,
which is what `union` returns and what the other functions take. All is O(n log n), or O(n) on sets.

- *waiting*: the union of the `wait` events. Waiting wins over an event around it: a thread that waits inside
  a span called `compute` is not computing.
- *compute*: the union of the `compute` events, less waiting.
- *communication*: the union of the `send` and `recv` events. Waiting is **not** taken off: the wire is in use
  while the thread sleeps.
- *busy*: the union of all that is not `wait`, less waiting. Busy and waiting together never exceed the time.

A place computes, communicates or is busy while any of its lanes is; it waits while one waits and none is busy.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["compute", "send", "recv", "wait", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """What ran from `start` to `end` (seconds, on any one clock) on a lane.

    A lane is one thing that can be busy: a thread, a link's direction, a stage. `"rank 0/comm"` is the lane
    `comm` of the *place* `rank 0`. Overlap is what happens inside a place: rank 1's communication does not
    hide behind rank 0's computation. A lane without a slash belongs to the one place that has no name, which
    suits a trace of one process.

    >>> Event("rank 0/comm", "send", "group 3", 1.0, 1.5, bytes=1 << 20).seconds
    0.5
    """

    lane: str
    kind: Kind
    name: str
    start: float
    end: float
    bytes: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"event {self.name!r} has kind {self.kind!r}; expected one of {', '.join(KINDS)}; "
                f"use 'other' for work that neither computes nor communicates"
            )
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(
                f"event {self.name!r} on lane {self.lane!r} runs from {self.start} to {self.end}; "
                f"expected finite seconds with start <= end; take both from the same clock"
            )
        for unit, amount in (("bytes", self.bytes), ("flops", self.flops)):
            if amount is not None and not 0 <= amount < math.inf:
                raise ValueError(
                    f"event {self.name!r} has {unit}={amount}; expected a finite number >= 0; "
                    f"leave {unit} out where it is not known"
                )

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def place(self) -> str:
        """The part of the lane before its last slash: what overlap is measured in."""
        return self.lane.rpartition("/")[0]


@dataclass(frozen=True)
class Activity:
    """The sets of seconds in which a lane or a place did each thing."""

    compute: list[Interval]
    communication: list[Interval]
    waiting: list[Interval]
    busy: list[Interval]


def lane_activity(events: Sequence[Event]) -> Activity:
    """The activity of the lane that has these events."""

    def covered(*kinds: Kind) -> list[Interval]:
        return union((e.start, e.end) for e in events if e.kind in kinds)

    waiting = covered("wait")
    return Activity(
        compute=difference(covered("compute"), waiting),
        communication=covered("send", "recv"),
        waiting=waiting,
        busy=difference(covered("compute", "send", "recv", "other"), waiting),
    )


def place_activity(lanes: Iterable[Activity]) -> Activity:
    """The activity of the place that has these lanes."""
    lanes = list(lanes)
    busy = union(x for lane in lanes for x in lane.busy)
    return Activity(
        compute=union(x for lane in lanes for x in lane.compute),
        communication=union(x for lane in lanes for x in lane.communication),
        waiting=difference(union(x for lane in lanes for x in lane.waiting), busy),
        busy=busy,
    )


def group_by_lane(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each lane, lanes in natural order: `rank 2/comm` before `rank 10/comm`."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(event.lane, []).append(event)
    return {lane: lanes[lane] for lane in sorted(lanes, key=natural_key)}


def natural_key(text: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts numbers inside text by value; the text itself breaks ties such as `1` and `01`.

    >>> sorted(["rank 10", "rank 2"], key=natural_key)
    ['rank 2', 'rank 10']
    """
    parts = re.split(r"([0-9]+)", text)
    return [(int(part) if i % 2 else 0, "" if i % 2 else part) for i, part in enumerate(parts)], text


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The seconds that at least one interval covers; empty intervals vanish, touching ones merge.

    >>> union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The seconds that both sets cover.

    >>> intersection([(0.0, 3.0), (4.0, 6.0)], [(2.0, 5.0)])
    [(2.0, 3.0), (4.0, 5.0)]
    """
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The seconds that `a` covers and `b` does not.

    >>> difference([(0.0, 6.0)], [(1.0, 2.0), (5.0, 9.0)])
    [(0.0, 1.0), (2.0, 5.0)]
    """
    left: list[Interval] = []
    first = 0
    for start, end in a:
        while first < len(b) and b[first][1] <= start:
            first += 1
        k = first
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """How many seconds a set covers.

    >>> length([(0.0, 3.0), (4.0, 5.0)])
    4.0
    """
    return math.fsum(end - start for start, end in intervals)


def rows(intervals: Sequence[Interval]) -> list[int]:
    """Rows on which intervals can be drawn without one covering another: each takes the lowest free one.

    `intervals` must be sorted by start. As many rows are used as intervals run at once at the busiest moment.

    >>> rows([(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (4.0, 5.0)])
    [0, 1, 1, 0]
    """
    placed: list[int] = []
    free: list[int] = []
    running: list[tuple[float, int]] = []
    used = 0
    for start, end in intervals:
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, used = used, used + 1
        heapq.heappush(running, (end, row))
        placed.append(row)
    return placed
