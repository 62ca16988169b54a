"""Timelines as values, and their figures against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_values import events

from weft.timeline import KINDS, Baseline, Event, Timeline, exposed_seconds, overlap_efficiency


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
    ranks = {f"rank {r}": Timeline([Event("compute", "compute", "m", 100.0 * r, 100.0 * r + 1)]) for r in (0, 1)}
    merged = Timeline.merge(ranks, offsets={"rank 1": -99.5}, name="both")
    assert merged.lanes == ("rank 0/compute", "rank 1/compute")
    assert [(e.start, e.end) for e in merged.events] == [(0.0, 1.0), (0.5, 1.5)]
    assert (merged.start, merged.end, merged.seconds, merged.name) == (0.0, 1.5, 1.5, "both")


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
    assert summary.total.overlapped == sum(len(of_place(p, "compute") & of_place(p, "communication")) for p in places)


def test_computation_of_one_rank_does_not_hide_communication_of_another() -> None:
    apart = Timeline([Event("rank 0/compute", "compute", "", 0.0, 1.0), Event("rank 1/comm", "send", "", 0.0, 1.0)])
    together = Timeline([Event("rank 0/compute", "compute", "", 0.0, 1.0), Event("rank 0/comm", "send", "", 0.0, 1.0)])
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
    assert overlap_efficiency(12.0, matmul_seconds=10.0, sequential_seconds=10.1) is None, "next to nothing"
    assert overlap_efficiency(12.0, matmul_seconds=10.0, sequential_seconds=10.2) is not None
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
