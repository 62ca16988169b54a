"""Timelines: their value semantics, their figures, their drawings and their file format."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.timeline import KINDS, Baseline, Event, Timeline, exposed_seconds, overlap_efficiency
from weft.timeline.text import draw, format_bytes, format_seconds, tick_step

times = st.integers(0, 30)
events = st.builds(
    lambda lane, kind, a, b: Event(lane, kind, "x", float(min(a, b)), float(max(a, b))),
    st.sampled_from(["compute", "comm", "rank 0/compute", "rank 0/comm", "rank 1/compute", "rank 1/comm"]),
    st.sampled_from(KINDS),
    times,
    times,
)
finite = st.floats(-1e12, 1e12)  # seconds since anything that happened
# What a file must give back: any text, any double, any size.
wild_events = st.builds(
    lambda lane, kind, name, a, b, size, work: Event(
        lane, kind, name, min(a, b), max(a, b), bytes=size, flops=work
    ),
    st.text(),
    st.sampled_from(KINDS),
    st.text(),
    finite,
    finite,
    st.none() | st.integers(0, 1 << 60),
    st.none() | st.floats(0, 1e30) | st.integers(0, 1 << 60),
)


def test_the_order_of_events_does_not_matter() -> None:
    a, b = Event("x", "compute", "a", 1.0, 2.0), Event("x", "compute", "b", 0.0, 1.0)
    assert Timeline([a, b]) == Timeline([b, a])
    assert Timeline([a, b]).events == (b, a)
    assert Timeline([a]) != Timeline([a], name="other")


def test_lanes_are_in_natural_order() -> None:
    lanes = [f"rank {r}/comm" for r in (10, 9, 2)]
    assert Timeline([Event(lane, "send", "", 0.0, 1.0) for lane in lanes]).lanes == tuple(reversed(lanes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "computing"}, r"kind 'computing'; expected one of compute, send, recv, wait, other"),
        ({"end": 0.5}, r"runs from 1.0 to 0.5; expected finite seconds with start <= end"),
        ({"start": math.nan}, r"runs from nan"),
        ({"bytes": -1}, r"bytes=-1; expected a finite number >= 0"),
        ({"flops": math.inf}, r"flops=inf"),
    ],
)
def test_an_impossible_event_says_what_is_wrong(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"lane": "x", "kind": "send", "name": "n", "start": 1.0, "end": 2.0}
    with pytest.raises(ValueError, match=message):
        Event(**{**good, **fields})  # type: ignore[arg-type]


def test_merge_names_places_and_aligns_clocks() -> None:
    ranks = {
        f"rank {r}": Timeline([Event("compute", "compute", "m", 100.0 * r, 100.0 * r + 1)]) for r in (0, 1)
    }
    merged = Timeline.merge(ranks, offsets={"rank 1": -99.5}, name="both")
    assert merged.lanes == ("rank 0/compute", "rank 1/compute")
    assert [(e.start, e.end) for e in merged.events] == [(0.0, 1.0), (0.5, 1.5)]
    assert (merged.start, merged.end, merged.seconds, merged.name) == (0.0, 1.5, 1.5, "both")


# -- figures
# ---------------------------------------------------------------------------------------------------------


def oracle(own: list[Event]) -> dict[str, dict[str, set[int]]]:
    """What each lane did in each whole second, by brute force."""
    lanes: dict[str, dict[str, set[int]]] = {}
    for event in own:
        kinds = lanes.setdefault(event.lane, {kind: set() for kind in KINDS})
        kinds[event.kind] |= set(range(int(event.start), int(event.end)))
    return {
        lane: {
            "compute": k["compute"] - k["wait"],
            "communication": k["send"] | k["recv"],
            "waiting": k["wait"],
            "busy": (k["compute"] | k["send"] | k["recv"] | k["other"]) - k["wait"],
        }
        for lane, k in lanes.items()
    }


@given(st.lists(events, max_size=25))
def test_summary_agrees_with_brute_force(own: list[Event]) -> None:
    lanes = oracle(own)
    places = {lane.rpartition("/")[0] for lane in lanes}

    def of_place(place: str, what: str) -> set[int]:
        return set().union(*(x[what] for lane, x in lanes.items() if lane.rpartition("/")[0] == place))

    summary = Timeline(own).summary()
    assert {lane.lane for lane in summary.lanes} == set(lanes)
    for lane in summary.lanes:
        expected, place = lanes[lane.lane], lane.lane.rpartition("/")[0]
        overlapped = (expected["compute"] & of_place(place, "communication")) | (
            expected["communication"] & of_place(place, "compute")
        )
        assert lane.overlapped == len(overlapped)
        for what in ("compute", "communication", "waiting", "busy"):
            assert getattr(lane, what) == len(expected[what])
        assert lane.busy + lane.waiting <= summary.seconds
    for what in ("compute", "communication", "busy"):
        assert getattr(summary.total, what) == sum(len(of_place(p, what)) for p in places)
    assert summary.total.waiting == sum(len(of_place(p, "waiting") - of_place(p, "busy")) for p in places)
    assert summary.total.overlapped == sum(
        len(of_place(p, "compute") & of_place(p, "communication")) for p in places
    )


def test_computation_of_one_rank_does_not_hide_communication_of_another() -> None:
    apart = Timeline(
        [Event("rank 0/compute", "compute", "", 0.0, 1.0), Event("rank 1/comm", "send", "", 0.0, 1.0)]
    )
    together = Timeline(
        [Event("rank 0/compute", "compute", "", 0.0, 1.0), Event("rank 0/comm", "send", "", 0.0, 1.0)]
    )
    assert apart.summary().hidden_fraction == 0.0
    assert together.summary().hidden_fraction == 1.0


def test_ect_and_e_overlap_are_those_of_flux() -> None:
    timeline = Timeline([Event("a", "compute", "", 0.0, 10.0), Event("b", "send", "", 4.0, 12.0)])
    summary = timeline.summary(Baseline(matmul_seconds=10.0, sequential_seconds=18.0, bound_seconds=11.0))
    assert summary.ect == exposed_seconds(12.0, matmul_seconds=10.0) == 2.0
    assert summary.e_overlap == 1 - 2.0 / 8.0
    assert summary.bound_fraction == 11.0 / 12.0
    assert summary.hidden_fraction == 6.0 / 8.0
    assert str(summary).splitlines()[-5:] == [
        "time 12.000 s",
        "communication hidden 75.0%",
        "ECT 2.000 s",
        "E_overlap 0.750",
        "fraction of the bound 0.917",
    ]


def test_harm_is_negative_and_nothing_to_hide_is_none() -> None:
    assert overlap_efficiency(20.0, matmul_seconds=10.0, sequential_seconds=18.0) == 1 - 10.0 / 8.0
    assert overlap_efficiency(9.0, matmul_seconds=10.0, sequential_seconds=10.0) is None
    alone = Timeline([Event("a", "compute", "", 0.0, 1.0)]).summary()
    assert (alone.ect, alone.e_overlap, alone.bound_fraction, alone.hidden_fraction) == (
        None,
        None,
        None,
        None,
    )


def test_an_empty_timeline_has_figures_and_a_drawing() -> None:
    empty = Timeline([])
    assert empty.summary().total.busy == 0.0
    assert "total" in str(empty.summary())
    assert "compute" in empty.text()


# -- drawing
# ---------------------------------------------------------------------------------------------------------


def test_text_shows_what_each_lane_did_when() -> None:
    timeline = Timeline(
        [
            Event("compute", "compute", "", 10.0, 14.0),
            Event("compute", "wait", "", 12.0, 13.0),  # inside the computation: waiting wins
            Event("comm", "send", "", 11.0, 12.0),
            Event("comm", "recv", "", 12.0, 14.0),
            Event("comm", "other", "", 10.0, 10.5),
        ],
        name="measured",
    )
    title, comm, compute, axis, legend = timeline.text(width=49).splitlines()
    assert title == "measured"
    assert comm == "comm     " + "▒" * 5 + " " * 5 + ">" * 10 + "<" * 20
    assert compute == "compute  " + "█" * 20 + "░" * 10 + "█" * 10
    assert axis.startswith(" " * 9 + "|0 s ")
    assert legend.split() == ["█", "compute", ">", "send", "<", "recv", "░", "wait", "▒", "other"]


def test_a_short_event_in_an_idle_lane_is_still_seen() -> None:
    timeline = Timeline([Event("a", "compute", "", 0.0, 1000.0), Event("b", "send", "", 500.0, 500.001)])
    assert timeline.text(width=80).splitlines()[1].count(">") == 1


def test_stacked_timelines_share_the_axis_and_start_at_zero() -> None:
    short = [Event("a", "compute", "", 7.0, 8.0)]
    long = [Event("a", "compute", "", 100.0, 102.0)]
    lines = draw([("predicted", short), ("measured", long)], width=63).splitlines()
    assert [line.count("█") for line in lines[:4]] == [0, 30, 0, 60]


@given(st.lists(events, max_size=20), st.integers(40, 130))
def test_text_keeps_to_its_width(own: list[Event], width: int) -> None:
    drawing = list(Timeline(own).text(width=width).splitlines()[:-2])
    assert all(len(line) <= width for line in drawing)
    assert len(drawing) == len({e.lane for e in own})


def test_a_name_cannot_steer_the_terminal() -> None:
    timeline = Timeline([Event("a\x1b[2J\nb", "compute", "", 0.0, 1.0)], name="x\rx")
    for text in (timeline.text(), str(timeline.summary())):
        assert all(c.isprintable() or c == "\n" for c in text)
    assert len(timeline.text().splitlines()) == 4


def test_text_refuses_a_width_that_leaves_no_room() -> None:
    with pytest.raises(ValueError, match="got width=10; expected at least 40 columns"):
        Timeline([]).text(width=10)


@given(st.floats(1e-9, 1e4), st.integers(1, 20))
def test_ticks_are_round_and_few(seconds: float, most: int) -> None:
    step = tick_step(seconds, most=most)
    assert seconds / step <= most
    assert f"{step:e}".startswith(("1.0", "2.0", "5.0"))
    assert seconds / step * 10 > most or most == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.5, "1.50 s"),
        (0.0123456, "12.3 ms"),
        (123e-6, "123 µs"),
        (4e-9, "4.00 ns"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_are_set_with_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_bytes_are_set_with_a_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1.02e+03 B",
        "1.5 KiB",
        "5 GiB",
        "3 TiB",
    ]


# -- file
# ------------------------------------------------------------------------------------------------------------


@given(st.lists(wild_events, max_size=8), st.text())
def test_chrome_json_gives_back_the_same_timeline(own: list[Event], name: str) -> None:
    timeline = Timeline(own, name=name)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_save_and_load(tmp_path: Path) -> None:
    timeline = Timeline(
        [Event("rank 0/comm", "send", "Gruppe ö", 0.1, 0.30000000000000004, bytes=7)], name="t"
    )
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
    names = {
        (r["name"], r["pid"]): r["args"]["name"] for r in records if r["ph"] == "M" and "name" in r["args"]
    }
    assert names["process_name", send["pid"]] == "rank 1"
    assert names["thread_name", send["pid"]] == "comm"


def test_a_trace_of_another_tool_loads() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 7, "tid": 8, "ts": 2_000_000, "dur": 500_000},
        {"ph": "i", "name": "instant", "pid": 7, "tid": 8, "ts": 1},
    ]
    assert Timeline.from_json(json.dumps(trace)).events == (
        Event("python/thread 8", "other", "aten::mm", 2.0, 2.5),
    )


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


@pytest.mark.parametrize(
    "module",
    [
        "timeline.intervals",
        "timeline.activity",
        "timeline.event",
        "timeline.summary",
        "timeline.text",
        "timeline.value",
        "timeline.clocks",
        "tracing",
    ],
)
def test_the_examples_in_the_docstrings_are_right(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"weft.{module}"))
    assert result.failed == 0
