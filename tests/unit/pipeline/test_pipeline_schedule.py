"""Actions, schedules and stage graphs: what prints parses back, what cannot be is refused by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_values import graphs, listed, orders

from weft.pipeline import Action, Costs, Edge, Kind, Schedule, StageGraph, chain, lower, schedule, simulate, validate

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1")


@given(st.builds(Action, st.integers(0, 999), st.sampled_from(Kind), st.integers(0, 999)))
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0 ", "2f0", "2F0.5", "²F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 2F0"):
        Action.parse(text)


def test_actions_sort_by_stage_then_kind_then_microbatch() -> None:
    words = ["1F0", "0W0", "0F1", "0B0", "0F0", "0I0"]
    actions = sorted(Action.parse(word) for word in words)
    assert " ".join(map(str, actions)) == "0F0 0F1 0B0 0I0 0W0 1F0"
    assert actions[0] <= actions[1] < actions[-1]


def test_a_negative_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got stage -1 and micro-batch 0"):
        Action(-1, Kind.FORWARD, 0)


@given(orders())
@settings(max_examples=60, deadline=None)
def test_any_schedule_parses_back_also_one_that_cannot_finish(made: Schedule) -> None:
    assert Schedule.parse(str(made)) == made
    assert hash(Schedule.parse(str(made))) == hash(made)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"), "1B1 is missing"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"), "1W1 is missing"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), "1F1 is missing"),
        (("0F0 0F1 0B0 0F0 0B1", "1F0 1B0 1F1 1B1"), "got 0F0 twice on rank 0"),
        (("0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"), "got 0B1 twice on rank 0"),
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), "got 1B0 before 1F0 on rank 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"), "got 1W0 before 1I0 on rank 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1B0 1F1 1B1"), "got 1B0 and 1I0 on rank 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1W0 1F1 1B1"), "got 1W0 and 1B0 on rank 1"),
        (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "got 1B0 on rank 1, but stage 1 is on rank 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 2F0"), "got 2F0 on rank 1; expected stages 0 to 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1F2"), "got 1F2 on rank 1; expected stages 0 to 1"),
        (("0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1", ""), "rank 1 has no actions"),
        ((), "0F0 is missing"),
    ],
)
def test_an_impossible_schedule_is_refused_with_the_action_named(lists: tuple[str, ...], message: str) -> None:
    assert Schedule("good", 2, 2, listed(*GOOD)).splits_backward(1, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule("bad", 2, 2, listed(*lists))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"), [("two words", 1, 1), ("", 1, 1), ("x", 0, 1), ("x", 1, 0)]
)
def test_odd_names_and_sizes_are_refused(name: str, stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        Schedule(name, stages, microbatches, ())


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "schedule x: 1 stages, 1 micro-batches, 1 ranks", str(Schedule("x", 2, 2, listed(*GOOD))) + " 7"],
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Schedule.parse(text)


def test_stages_and_ranks() -> None:
    made = schedule("interleaved-1f1b", stages=5, microbatches=2, ranks=2)
    assert [made.rank_of(stage) for stage in range(5)] == [0, 1, 0, 1, 0]
    assert made.stages_of(0) == (0, 2, 4)
    with pytest.raises(ValueError, match="got stage 5"):
        made.rank_of(5)
    with pytest.raises(ValueError, match="got rank 2"):
        made.stages_of(2)


STUCK = Schedule("mine", 3, 2, listed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"))


def test_a_deadlock_is_shown_as_the_grid_with_the_stuck_cells_marked() -> None:
    with pytest.raises(ValueError, match="cannot finish") as caught:
        validate(STUCK)
    assert str(caught.value).splitlines() == [
        "schedule mine cannot finish: ranks wait for each other in a circle",
        "step  rank 0  rank 1  rank 2",
        "   0     0F0       .       .",
        "   1     0F1     1F0       .",
        "   2   [0B0]   [1B0]   [2F1]",
        "rank 0 is stuck at 0B0, which needs 1B0: that comes 2nd on rank 1",
        "rank 1 is stuck at 1B0, which needs 2B0: that comes 4th on rank 2",
        "rank 2 is stuck at 2F1, which needs 1F1: that comes 3rd on rank 1",
        "expected an order in which every action comes after those it needs; move those of a stuck rank",
    ]


def test_a_deadlock_is_found_before_anything_is_lowered_or_simulated() -> None:
    for attempt in (lambda: lower(STUCK), lambda: simulate(STUCK, Costs.uniform(3))):
        with pytest.raises(ValueError, match=r"\[1B0\]"):
            attempt()


def test_a_long_way_to_a_deadlock_is_cut_short() -> None:
    made = schedule("1f1b", stages=2, microbatches=30)
    swap = {27: 29, 29: 27}
    last = tuple(Action(1, a.kind, swap.get(a.microbatch, a.microbatch)) for a in made.ranks[1])
    long = Schedule("long", 2, 30, (made.ranks[0], last))
    with pytest.raises(ValueError, match="cannot finish") as caught:
        validate(long)
    lines = str(caught.value).splitlines()
    assert len(lines) < 16
    assert lines[-4].split()[1:] == ["[0B27]", "[1F29]"]


def test_whether_a_schedule_can_finish_depends_on_the_graph() -> None:
    backwards_round = Schedule("branches", 2, 1, listed("1F0 1B0 0F0 0B0"))
    with pytest.raises(ValueError, match="cannot finish"):
        validate(backwards_round)
    assert validate(backwards_round, StageGraph(2, ())).count == 4
    with pytest.raises(ValueError, match="a graph of 3 stages for a schedule of 2"):
        validate(backwards_round, chain(3))


@given(st.integers(1, 6).flatmap(graphs))
def test_a_graph_parses_back(graph: StageGraph) -> None:
    assert StageGraph.parse(str(graph)) == graph
    assert sum(len(graph.into(s)) for s in range(graph.stages)) == len(graph.edges)
    assert sum(len(graph.out_of(s)) for s in range(graph.stages)) == len(graph.edges)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Edge(1, 0), "from stage 1 to stage 0"),
        (lambda: Edge(1, 1), "from stage 1 to stage 1"),
        (lambda: Edge(-1, 1), "from stage -1 to stage 1"),
        (lambda: Edge(0, 1, "two words"), "'two words'"),
        (lambda: StageGraph(2, (Edge(0, 2),)), "0->2 x; expected stages 0 to 1"),
        (lambda: StageGraph(2, (Edge(0, 1), Edge(0, 1))), "0->1 x twice"),
        (lambda: StageGraph(2, (Edge(0, 1), Edge(0, 1, gradient=False))), "twice"),
        (lambda: StageGraph(3, (Edge(0, 1), Edge(0, 2, gradient=False))), "once with and once without"),
        (lambda: StageGraph(0, ()), "got 0 stages"),
        (lambda: StageGraph.parse("0->1 x"), "got the graph"),
        (lambda: Edge.parse("0 1 x"), "got the edge"),
    ],
)
def test_an_impossible_graph_is_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()  # type: ignore[operator]
