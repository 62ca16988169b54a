"""Timelines drawn with characters, and how figures are set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_values import events

from weft.timeline import Event, Timeline
from weft.timeline.text import draw, format_bytes, format_seconds, tick_step

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
