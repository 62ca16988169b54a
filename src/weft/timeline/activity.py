"""What a lane, or a whole place, was doing when: events turned into sets of seconds.

- *waiting*: the union of the `wait` events. Waiting wins over an event around it: a thread that waits inside
  a span called `compute` is not computing.
- *compute*: the union of the `compute` events, less waiting.
- *communication*: the union of the `send` and `recv` events. Waiting is **not** taken off: the wire is in use
  while the thread sleeps.
- *busy*: the union of all that is not `wait`, less waiting. Busy and waiting together never exceed the time.

A place computes, communicates or is busy while any of its lanes is; it waits while one waits and none is busy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.timeline.event import Event, Kind
from weft.timeline.intervals import Interval, difference, union


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
