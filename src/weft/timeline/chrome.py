"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open.

A place is a process there and a lane a thread. Events of one lane that run at the same time go to threads of
the same name, because those viewers drop an event that starts inside another one and ends after it. Times are
microseconds there; the exact seconds are kept beside them, in `args`, so that a timeline comes back equal to
the one that was saved. Traces of other tools load too, as far as they have complete events (`"ph": "X"`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.timeline.events import KINDS, Event, group_by_lane, rows

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
