"""`Timeline`: events in order of start; the calls of a trace, each with a timeline of its own; and timelines as Chrome
trace JSON, which Perfetto and chrome://tracing open.

A place is a process there and a lane a thread. Events of one lane that run at the same time go to threads of the
same name, because those viewers drop an event that starts inside another one and ends after it. Times are
microseconds there; the exact seconds are kept beside them, in `args`, so that a timeline comes back equal to the
one that was saved. Traces of other tools load too, as far as they have complete events (`"ph": "X"`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.timeline.events import KINDS, Event, group_by_lane, rows
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
        return to_json(self.events, name=self.name)

    @classmethod
    def from_json(cls, trace: str) -> Timeline:
        """A timeline from Chrome trace JSON, of `to_json` or of another tool."""
        events, name = from_json(trace)
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


Json = dict[str, Any]


def to_json(events: Sequence[Event], *, name: str) -> str:
    """The trace as text; `events` are sorted by start."""
    origin = min((e.start for e in events), default=0.0)
    places: dict[str | None, int] = {}
    records: list[Json] = []
    thread = 0
    for lane, own in group_by_lane(events).items():
        place, slash, lane_name = lane.rpartition("/")
        key = place if slash else None
        if key not in places:
            places[key] = len(places) + 1
            if key is not None:
                records.append(_metadata("process_name", places[key], 0, name=key))
        row_of = rows([(e.start, e.end) for e in own])
        for row in range(max(row_of) + 1):
            records.append(_metadata("thread_name", places[key], thread + row, name=lane_name))
            records.append(_metadata("thread_sort_index", places[key], thread + row, sort_index=thread + row))
        records += [_complete(e, origin, places[key], thread + r) for e, r in zip(own, row_of, strict=True)]
        thread += max(row_of) + 1
    whole = {"displayTimeUnit": "ms", "otherData": {"timeline": name}, "traceEvents": records}
    return json.dumps(whole, allow_nan=False, indent=None, separators=(",", ":"))


def from_json(text: str) -> tuple[list[Event], str]:
    """The events of a trace, and the name of the timeline ("" in traces of other tools)."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"got text that is not JSON ({e}); expected a Chrome trace, as Timeline.save writes") from e
    records = whole.get("traceEvents") if isinstance(whole, dict) else whole
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise ValueError(
            "got JSON without a list of trace events; expected a Chrome trace, as Timeline.save writes: "
            'either a list of objects or {"traceEvents": [...]}'
        )
    lanes = _Lanes(records)
    events = [_event(r, lanes) for r in records if r.get("ph") == "X"]
    other = whole.get("otherData") if isinstance(whole, dict) else None
    return events, str(other.get("timeline", "")) if isinstance(other, dict) else ""


def _metadata(what: str, pid: int, tid: int, **args: object) -> Json:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _complete(event: Event, origin: float, pid: int, tid: int) -> Json:
    # Whole nanoseconds: rounding each end once keeps neighbours from overlapping by a rounding error.
    start, end = (round((t - origin) * 1e9) for t in (event.start, event.end))
    args: Json = {"start": event.start, "end": event.end}
    args |= {k: v for k, v in (("bytes", event.bytes), ("flops", event.flops)) if v is not None}
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid, **times, "args": args}


class _Lanes:
    """Lane names from the metadata records of a trace."""

    def __init__(self, records: Iterable[Json]) -> None:
        self._processes: dict[str, str] = {}
        self._threads: dict[tuple[str, str], str] = {}
        for r in records:
            args = r.get("args")
            if r.get("ph") != "M" or not isinstance(args, dict):
                continue
            if r.get("name") == "process_name":
                self._processes[str(r.get("pid"))] = str(args.get("name"))
            elif r.get("name") == "thread_name":
                self._threads[str(r.get("pid")), str(r.get("tid"))] = str(args.get("name"))

    def lane(self, record: Json) -> str:
        pid, tid = str(record.get("pid")), str(record.get("tid"))
        thread = self._threads.get((pid, tid), f"thread {tid}")
        return f"{self._processes[pid]}/{thread}" if pid in self._processes else thread


def _event(record: Json, lanes: _Lanes) -> Event:
    args = record.get("args")
    args = args if isinstance(args, Mapping) else {}
    kind = record.get("cat")
    try:
        start = args["start"] if "start" in args else record["ts"] / 1e6
        end = args["end"] if "end" in args else (record["ts"] + record["dur"]) / 1e6
        return Event(
            lanes.lane(record),
            kind if kind in KINDS else "other",
            str(record["name"]),
            float(start),
            float(end),
            bytes=args.get("bytes"),
            flops=args.get("flops"),
        )
    except (KeyError, TypeError) as e:
        raise ValueError(
            f"got the trace event {json.dumps(record)[:200]}, which has no usable name, ts or dur ({e}); "
            f"expected a complete event of a Chrome trace"
        ) from e
