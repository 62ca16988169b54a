"""How much of a timeline was work, how much was waiting, and how well communication was hidden behind matmuls.

*Of a lane.* Its *compute*, *communication*, *waiting* and *busy* seconds are defined at the head of `events`. Its
*overlapped* seconds are its compute while any lane of the same place communicates, and its communication while any lane
of the same place computes. The total adds up places, so with P ranks it is in rank-seconds.

*Of a call*, after Flux. `ECT = time - best matmul alone` is the communication time that is left to see, and
`E_overlap = 1 - ECT(ours) / ECT(sequential)`: 1 is all hidden, 0 is no better than matmul and then communication, and a
negative figure is harm. Where there is next to nothing to hide there is no E_overlap. Under the table of calls each
kind has a line with the reason of its plan: why it overlapped, or why not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.timeline.events import (
    Activity,
    Event,
    Interval,
    group_by_lane,
    intersection,
    lane_activity,
    length,
    place_activity,
    union,
)
from weft.timeline.text import align_columns, printable, time_unit

_LEAST_HIDEABLE = 0.01  # of the sequential time: less is lost in the noise of both, and the quotient says nothing


def exposed_seconds(seconds: float, *, matmul_seconds: float) -> float:
    """ECT: the part of `seconds` that the matmul alone does not explain.

    >>> exposed_seconds(12.0, matmul_seconds=10.0)
    2.0
    """
    return seconds - matmul_seconds


def overlap_efficiency(seconds: float, *, matmul_seconds: float, sequential_seconds: float) -> float | None:
    """E_overlap; None where the sequential run is hardly slower than its matmul: there is next to nothing to hide.

    >>> overlap_efficiency(12.0, matmul_seconds=10.0, sequential_seconds=18.0)
    0.75
    >>> overlap_efficiency(12.0, matmul_seconds=10.0, sequential_seconds=10.05) is None
    True
    """
    hideable = exposed_seconds(sequential_seconds, matmul_seconds=matmul_seconds)
    if hideable <= 0 or hideable < _LEAST_HIDEABLE * sequential_seconds:
        return None
    return 1.0 - exposed_seconds(seconds, matmul_seconds=matmul_seconds) / hideable


@dataclass(frozen=True)
class Baseline:
    """The best matmul alone, matmul and then communication, a bound, and communication alone, where they are known."""

    matmul_seconds: float
    sequential_seconds: float
    bound_seconds: float | None = None
    communication_seconds: float | None = None


class OverlapFigures:
    """What took `seconds`, beside a baseline: the figures that both together give."""

    seconds: float
    baseline: Baseline | None

    @property
    def ect(self) -> float | None:
        """Exposed seconds of communication; None without a baseline."""
        if self.baseline is None:
            return None
        return exposed_seconds(self.seconds, matmul_seconds=self.baseline.matmul_seconds)

    @property
    def e_overlap(self) -> float | None:
        """Overlap efficiency; None without a baseline, or where the baseline leaves next to nothing to hide."""
        if self.baseline is None:
            return None
        return overlap_efficiency(
            self.seconds,
            matmul_seconds=self.baseline.matmul_seconds,
            sequential_seconds=self.baseline.sequential_seconds,
        )

    @property
    def bound_fraction(self) -> float | None:
        """The bound over the time: 1 is at the bound. None where no bound is known, or no time was taken."""
        bound = self.baseline.bound_seconds if self.baseline else None
        return None if bound is None or self.seconds == 0 else bound / self.seconds


@dataclass(frozen=True)
class LaneSummary:
    """Seconds of one lane, or of all places together."""

    lane: str
    compute: float
    communication: float
    overlapped: float
    waiting: float
    busy: float


@dataclass(frozen=True)
class CallFigures(OverlapFigures):
    """The calls of one kind: how many, their median seconds, what they are judged by, and why they went as they did.

    setups:   how many of the calls made their buffers; they are not in the medians where there are others
    reasons:  of their plans, each once
    """

    what: str
    count: int
    seconds: float
    hidden_fraction: float | None = None
    baseline: Baseline | None = None
    setups: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def e_overlap(self) -> float | None:
        """Overlap efficiency; None also where all calls made their buffers: their time says nothing about the next."""
        return None if self.setups == self.count else super().e_overlap

    @property
    def note(self) -> str:
        """The plans' reasons, and what the medians leave out.

        >>> CallFigures("matmul 8 x 8", 3, 1.0, setups=1, reasons=("there is only one rank",)).note
        'there is only one rank; set-up: 1 of 3 calls, left out'
        """
        parts = [printable(reason) for reason in self.reasons]
        if self.setups:
            fate = "no E_overlap" if self.setups == self.count else "left out"
            parts.append(f"set-up: {self.setups} of {self.count} calls, {fate}")
        return "; ".join(parts)

    def cells(self, factor: float) -> list[str]:
        """One row of the table of calls; a dash where a figure is not known."""
        base = self.baseline
        times = (
            self.seconds,
            base.matmul_seconds if base else None,
            base.communication_seconds if base else None,
            base.sequential_seconds if base else None,
            base.bound_seconds if base else None,
            self.ect,
        )
        shares = (self.e_overlap, self.bound_fraction, self.hidden_fraction)
        return [
            printable(self.what),
            str(self.count),
            *("-" if t is None else f"{t * factor:.3f}" for t in times),
            *("-" if s is None else f"{s:.3f}" for s in shares),
        ]


CALL_COLUMNS = ("calls", "time", "matmul", "comm", "sequential", "bound", "ECT", "E_overlap", "of bound", "hidden")


@dataclass(frozen=True)
class Summary(OverlapFigures):
    """The figures of one timeline; prints as a table, and under it one of the calls, a row for each kind."""

    seconds: float
    lanes: tuple[LaneSummary, ...]
    total: LaneSummary
    baseline: Baseline | None = None
    calls: tuple[CallFigures, ...] = ()

    @property
    def hidden_fraction(self) -> float | None:
        """The share of communication that ran under computation; None where nothing was communicated."""
        return self.total.overlapped / self.total.communication if self.total.communication else None

    def remarks(self) -> list[str]:
        """The figures of the whole timeline, one line each.

        >>> from weft.timeline import Event, Timeline
        >>> matmul, rows = Event("cpu", "compute", "matmul", 0.0, 2.0), Event("nic", "send", "rows", 1.0, 3.0)
        >>> Timeline([matmul, rows]).summary(Baseline(2.0, 4.0)).remarks()
        ['time 3.000 s', 'communication hidden 50.0%', 'ECT 1.000 s', 'E_overlap 0.500']
        """
        factor, unit = time_unit(self.seconds)
        figures = (
            ("time", self.seconds * factor, f"{{:.3f}} {unit}"),
            ("communication hidden", self.hidden_fraction, "{:.1%}"),
            ("ECT", None if self.ect is None else self.ect * factor, f"{{:.3f}} {unit}"),
            ("E_overlap", self.e_overlap, "{:.3f}"),
            ("fraction of the bound", self.bound_fraction, "{:.3f}"),
        )
        return [f"{name} {form.format(value)}" for name, value, form in figures if value is not None]

    def table(self) -> list[list[str]]:
        """The heading, one row a lane and the total, as text cells."""
        factor, unit = time_unit(self.seconds)
        table = [[f"lane ({unit})", "compute", "comm", "overlapped", "waiting", "busy"]]
        for x in (*self.lanes, self.total):
            seconds = (x.compute, x.communication, x.overlapped, x.waiting, x.busy)
            table.append([printable(x.lane), *(f"{s * factor:.3f}" for s in seconds)])
        return table

    def call_table(self) -> list[list[str]]:
        """The heading and one row for each kind of call, as text cells; empty without calls.

        `time` is the median; `matmul`, `comm`, `sequential` and `bound` are what the plan's curves predict.
        """
        if not self.calls:
            return []
        factor, unit = time_unit(max(call.seconds for call in self.calls))
        return [[f"call ({unit})", *CALL_COLUMNS], *(call.cells(factor) for call in self.calls)]

    def call_notes(self) -> list[str]:
        """One line for each kind of call that there is something to say about."""
        return [f"{printable(call.what)}: {call.note}" for call in self.calls if call.note]

    def __str__(self) -> str:
        calls = self.call_table()
        under = ["", align_columns(calls), *self.call_notes()] if calls else []
        return "\n".join([align_columns(self.table()), *self.remarks(), *under])


def summarize(events: Sequence[Event], *, seconds: float, baseline: Baseline | None = None) -> Summary:
    """Sweeps the events of a timeline that lasted `seconds`."""
    lanes = {lane: lane_activity(own) for lane, own in group_by_lane(events).items()}
    by_place: dict[str, list[Activity]] = {}
    for lane, activity in lanes.items():
        by_place.setdefault(lane.rpartition("/")[0], []).append(activity)
    places = {place: place_activity(activities) for place, activities in by_place.items()}

    rows = []
    for lane, own in lanes.items():
        place = places[lane.rpartition("/")[0]]
        hidden = intersection(own.compute, place.communication) + intersection(own.communication, place.compute)
        rows.append(_lane_summary(lane, own, overlapped=union(hidden)))
    wholes = [
        _lane_summary(name, own, overlapped=intersection(own.compute, own.communication))
        for name, own in places.items()
    ]
    return Summary(seconds, tuple(rows), _add_up(wholes), baseline)


def _lane_summary(lane: str, activity: Activity, *, overlapped: list[Interval]) -> LaneSummary:
    return LaneSummary(
        lane,
        compute=length(activity.compute),
        communication=length(activity.communication),
        overlapped=length(overlapped),
        waiting=length(activity.waiting),
        busy=length(activity.busy),
    )


def _add_up(wholes: Sequence[LaneSummary]) -> LaneSummary:
    return LaneSummary(
        "total",
        compute=math.fsum(x.compute for x in wholes),
        communication=math.fsum(x.communication for x in wholes),
        overlapped=math.fsum(x.overlapped for x in wholes),
        waiting=math.fsum(x.waiting for x in wholes),
        busy=math.fsum(x.busy for x in wholes),
    )
