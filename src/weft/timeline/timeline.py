"""`Timeline`: events in order of start; and the calls of a trace, each with a timeline of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.timeline import chrome
from weft.timeline.events import Event, group_by_lane
from weft.timeline.summary import Baseline, CallFigures, OverlapFigures, Summary, summarize
from weft.timeline.text import draw


def _order(event: Event) -> tuple[object, ...]:
    amounts = (-1 if x is None else x for x in (event.bytes, event.flops))
    return (event.start, event.end, event.lane, event.kind, event.name, *amounts)


@dataclass(frozen=True, init=False)
class Timeline:
    """Events in order of start, predicted by a simulation or recorded by a trace; both look the same.

    The order in which events are given does not matter: two timelines of the same events and name are equal.

    >>> matmul = Event("compute", "compute", "matmul", 0.0, 0.006, flops=2e9)
    >>> rows = Event("comm", "send", "rows of rank 1", 0.002, 0.008, bytes=1 << 20)
    >>> print(Timeline([matmul, rows]).text(width=49))
    comm               >>>>>>>>>>>>>>>>>>>>>>>>>>>>>>
    compute  ██████████████████████████████
             |0 ms                    |5
             █ compute  > send  < recv  ░ wait  ▒ other
    """

    events: tuple[Event, ...]
    name: str

    def __init__(self, events: Iterable[Event], *, name: str = "") -> None:
        object.__setattr__(self, "events", tuple(sorted(events, key=_order)))
        object.__setattr__(self, "name", name)

    @property
    def start(self) -> float:
        """When the first event starts; 0 without events."""
        return self.events[0].start if self.events else 0.0

    @property
    def end(self) -> float:
        """When the last event ends; 0 without events."""
        return max((e.end for e in self.events), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the lanes, in natural order."""
        return tuple(group_by_lane(self.events))

    def shifted(self, seconds: float) -> Timeline:
        """The same events on a clock that is `seconds` ahead."""
        return Timeline((replace(e, start=e.start + seconds, end=e.end + seconds) for e in self.events), name=self.name)

    @classmethod
    def merge(
        cls, places: Mapping[str, Timeline], *, offsets: Mapping[str, float] | None = None, name: str = ""
    ) -> Timeline:
        """One timeline of several, each under the name of its place and moved by its clock's offset.

        >>> one = Timeline([Event("compute", "compute", "matmul", 5.0, 6.0)])
        >>> Timeline.merge({"rank 0": one, "rank 1": one}, offsets={"rank 1": 0.5}).lanes
        ('rank 0/compute', 'rank 1/compute')
        """
        offsets = offsets or {}
        return cls(
            (
                replace(e, lane=f"{place}/{e.lane}")
                for place, timeline in places.items()
                for e in timeline.shifted(offsets.get(place, 0.0)).events
            ),
            name=name,
        )

    def summary(self, baseline: Baseline | None = None) -> Summary:
        """Busy, waiting and overlapped time per lane and in total; ECT and E_overlap against a baseline."""
        return summarize(self.events, seconds=self.seconds, baseline=baseline)

    def text(self, *, width: int = 100) -> str:
        """The timeline drawn with characters: one row a lane, a time axis and a legend."""
        return draw([(self.name, self.events)], width=width)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> str:
        """Chrome trace JSON; `from_json` gives back an equal timeline."""
        return chrome.to_json(self.events, name=self.name)

    @classmethod
    def from_json(cls, trace: str) -> Timeline:
        """A timeline from Chrome trace JSON, of `to_json` or of another tool."""
        events, name = chrome.from_json(trace)
        return cls(events, name=name)

    def save(self, path: str | Path) -> None:
        """Writes Chrome trace JSON, which Perfetto opens."""
        Path(path).write_text(self.to_json(), encoding="ascii")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Reads what `save` wrote, or the Chrome trace of another tool."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from e


@dataclass(frozen=True)
class TracedCall(OverlapFigures):
    """One call of an op: what it was, how long it took here, what it is judged by, and what happened in it.

    what:       the op and its shape; calls of one kind have the same
    plan:       the text of the plan that it followed
    predicted:  draws what the plan promised, for all ranks; None where nothing was predicted
    reason:     why the plan is as it is: why it overlaps, or why not
    is_setup:   whether it made buffers that later calls find ready
    """

    what: str
    plan: str
    seconds: float
    timeline: Timeline
    baseline: Baseline | None = None
    predicted: Callable[[], Timeline] | None = field(default=None, compare=False)
    reason: str = ""
    is_setup: bool = False


def figures(calls: Iterable[TracedCall]) -> tuple[CallFigures, ...]:
    """One row for each kind of call, in the order of the first of each; those that made buffers only if all did.

    >>> matmul = Timeline([])
    >>> both = [TracedCall("matmul 8x8", "", seconds, matmul, Baseline(1.0, 3.0)) for seconds in (1.5, 2.5)]
    >>> [(row.what, row.count, row.seconds, row.e_overlap) for row in figures(both)]
    [('matmul 8x8', 2, 2.0, 0.5)]
    """
    kinds: dict[str, list[TracedCall]] = {}
    for call in calls:
        kinds.setdefault(call.what, []).append(call)
    return tuple(_figures(what, same) for what, same in kinds.items())


def _figures(what: str, same: Sequence[TracedCall]) -> CallFigures:
    judged = [call for call in same if not call.is_setup] or same
    hidden = [h for call in judged if (h := call.timeline.summary().hidden_fraction) is not None]
    baseline = next((call.baseline for call in reversed(same) if call.baseline is not None), None)
    return CallFigures(
        what,
        count=len(same),
        seconds=statistics.median(call.seconds for call in judged),
        hidden_fraction=statistics.median(hidden) if hidden else None,
        baseline=baseline,
        setups=sum(call.is_setup for call in same),
        reasons=tuple(dict.fromkeys(call.reason for call in judged if call.reason)),
    )
