"""Timelines as Chrome trace JSON: there and back, what viewers read, and files that are none."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_values import events

from weft.timeline import KINDS, Event, Timeline

finite = st.floats(-1e12, 1e12)  # seconds since anything that happened
# What a file must give back: any text, any double, any size.
wild_events = st.builds(
    lambda lane, kind, name, a, b, size, work: Event(lane, kind, name, min(a, b), max(a, b), bytes=size, flops=work),
    st.text(),
    st.sampled_from(KINDS),
    st.text(),
    finite,
    finite,
    st.none() | st.integers(0, 1 << 60),
    st.none() | st.floats(0, 1e30) | st.integers(0, 1 << 60),
)


# ------------------------------------------------------------------------------------------------------------


@given(st.lists(wild_events, max_size=8), st.text())
def test_chrome_json_gives_back_the_same_timeline(own: list[Event], name: str) -> None:
    timeline = Timeline(own, name=name)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_save_and_load(tmp_path: Path) -> None:
    timeline = Timeline([Event("rank 0/comm", "send", "Gruppe ö", 0.1, 0.30000000000000004, bytes=7)], name="t")
    timeline.save(tmp_path / "trace.json")
    assert Timeline.load(tmp_path / "trace.json") == timeline


@given(st.lists(events, max_size=25))
def test_no_two_events_of_a_thread_overlap_in_the_file(own: list[Event]) -> None:
    """Perfetto drops an event that starts inside another one of its thread and ends after it."""
    records = [r for r in json.loads(Timeline(own).to_json())["traceEvents"] if r["ph"] == "X"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for r in records:
        threads.setdefault((r["pid"], r["tid"]), []).append((r["ts"], r["ts"] + r["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_chrome_json_has_what_viewers_read() -> None:
    document = json.loads(
        Timeline(
            [Event("rank 1/comm", "send", "group 0", 5.0, 5.001, bytes=9), Event("x", "wait", "w", 5.0, 6.0)]
        ).to_json()
    )
    records = document["traceEvents"]
    send = next(r for r in records if r["name"] == "group 0")
    assert (send["ph"], send["cat"], send["ts"], send["dur"], send["args"]["bytes"]) == (
        "X",
        "send",
        0.0,
        1000.0,
        9,
    )
    names = {(r["name"], r["pid"]): r["args"]["name"] for r in records if r["ph"] == "M" and "name" in r["args"]}
    assert names["process_name", send["pid"]] == "rank 1"
    assert names["thread_name", send["pid"]] == "comm"


def test_a_trace_of_another_tool_loads() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 7, "tid": 8, "ts": 2_000_000, "dur": 500_000},
        {"ph": "i", "name": "instant", "pid": 7, "tid": 8, "ts": 1},
    ]
    assert Timeline.from_json(json.dumps(trace)).events == (Event("python/thread 8", "other", "aten::mm", 2.0, 2.5),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "not JSON"),
        ('{"rows": []}', "without a list of trace events"),
        ("[1, 2]", "without a list of trace events"),
        ('[{"ph": "X", "name": "a", "ts": 1}]', "no usable name, ts or dur"),
        ('[{"ph": "X", "name": "a", "ts": "now", "dur": 2}]', "no usable name, ts or dur"),
        ('[{"ph": "X", "name": "a", "ts": 1, "dur": -2}]', "start <= end"),
    ],
)
def test_a_file_that_is_no_trace_says_so(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"odd\.json: .*{message}"):
        Timeline.load(file)
