"""The simulator: nothing starts too early, cards carry one thing at a time, and the papers' claims hold in it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_values import SIZES, costs, generated, graphs, needs

from weft.layout import DeclaredCluster, Layout, Mesh
from weft.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Direction,
    Edge,
    Kind,
    Schedule,
    Simulation,
    StageGraph,
    Transfers,
    chain,
    lower,
    schedule,
)
from weft.pipeline.schedules.simulate import simulate_lowered
from weft.reshard import plan_reshard

EPSILON = 1e-9


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    made = draw(generated())
    graph = draw(graphs(made.stages))
    return made.simulate(draw(costs(made.stages, graph)), graph, transfers=draw(st.sampled_from(Transfers)))


def check(found: Simulation) -> None:
    """What any run must keep to, against the schedule, the graph and the costs alone."""
    made, graph, spent = found.schedule, found.lowered.graph, found.costs
    assert len(found.actions) == sum(map(len, made.ranks))
    for actions in made.ranks:
        for a, b in pairwise(actions):
            assert found.actions[a][1] <= found.actions[b][0]  # in order, one at a time
    for action, (start, end) in found.actions.items():
        assert end - start == pytest.approx(spent.of(action))
        assert all(found.actions[needed][1] <= start for needed in needs(made, graph, action))
    for move, (start, end) in found.moves.items():
        if move.direction is Direction.GRADIENT:
            kind = Kind.INPUT_GRADIENT if made.splits_backward(move.source, move.microbatch) else Kind.BACKWARD
            assert found.actions[Action(move.source, kind, move.microbatch)][1] <= start
            used = Kind.INPUT_GRADIENT if made.splits_backward(move.target, move.microbatch) else Kind.BACKWARD
            assert end <= found.actions[Action(move.target, used, move.microbatch)][0]
        else:
            if move.source == move.producer:
                assert found.actions[Action(move.source, Kind.FORWARD, move.microbatch)][1] <= start
            else:
                had = (m for m in found.moves if m.target == move.source and m.producer == move.producer)
                same = (m for m in had if (m.tensor, m.microbatch) == (move.tensor, move.microbatch))
                assert found.moves[next(same)][1] <= start
            assert end <= found.actions[Action(move.target, Kind.FORWARD, move.microbatch)][0]
    check_cards(found)
    assert found.lower_bound <= found.seconds + EPSILON
    assert 0 <= found.bubble < 1
    assert live_activations(found) == found.peak_activations


def check_cards(found: Simulation) -> None:
    """No card sends, or receives, two tensors at once."""
    busy: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for move, interval in found.moves.items():
        out, into = (found.costs.cards_of(stage, found.schedule) for stage in (move.source, move.target))
        if out != into:
            for card in out:
                busy.setdefault(("out", card), []).append(interval)
            for card in into:
                busy.setdefault(("in", card), []).append(interval)
    for intervals in busy.values():
        for a, b in pairwise(sorted(intervals)):
            assert a[1] <= b[0]


def live_activations(found: Simulation) -> tuple[int, ...]:
    """The most micro-batches that a stage holds, counted on the clock."""
    peaks = []
    for stage in range(found.schedule.stages):
        changes = []
        for action, (start, end) in found.actions.items():
            if action.stage == stage and action.kind is Kind.FORWARD:
                changes.append((start, 1))
            if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                changes.append((end, -1))
        level = [0]
        for _, change in sorted(changes):
            level.append(level[-1] + change)
        peaks.append(max(level))
    return tuple(peaks)


@given(simulations())
@settings(max_examples=100, deadline=None)
def test_random_graphs_costs_and_cards(found: Simulation) -> None:
    check(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_and_size(name: str) -> None:
    for stages, microbatches in SIZES:
        check(schedule(name, stages=stages, microbatches=microbatches).simulate(Costs.uniform(stages, transfer=0.5)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_that_stops_for_its_transfers(name: str) -> None:
    for stages, microbatches in SIZES[::4]:
        made = schedule(name, stages=stages, microbatches=microbatches)
        check(made.simulate(Costs.uniform(stages, transfer=0.5), transfers=Transfers.SYNCHRONOUS))


def longest_way(made: Schedule, graph: StageGraph, spent: Costs) -> float:
    """The length of the step with a wire for every transfer: the longest way through actions and transfers."""
    ends: dict[Action, float] = {}
    todo = [list(actions) for actions in made.ranks]
    clock = [0.0] * len(todo)
    while any(todo):
        for rank, actions in enumerate(todo):
            while actions and all(needed in ends for needed in needs(made, graph, actions[0])):
                action = actions.pop(0)
                start = clock[rank]
                for needed in needs(made, graph, action):
                    remote = made.rank_of(needed.stage) != rank
                    start = max(start, ends[needed] + (spent.transfer if remote else 0.0))  # type: ignore[operator]
                ends[action] = clock[rank] = start + spent.of(action)
    return max(ends.values())


@given(generated(), st.integers(0, 8))
@settings(max_examples=80, deadline=None)
def test_without_contention_the_step_is_the_longest_way(made: Schedule, quarters: int) -> None:
    graph = chain(made.stages)
    uniform = Costs.uniform(made.stages, transfer=quarters / 4)
    times = (uniform.forward, uniform.backward, uniform.input_gradient, uniform.weight_gradient)
    one_host = Costs(*times, quarters / 4, cards=((0,),) * made.stages)
    assert made.simulate(one_host, graph).seconds == pytest.approx(longest_way(made, graph, one_host))


def test_the_timeline_is_the_run() -> None:
    found = schedule("eager-1f1b", stages=2, microbatches=3).simulate(Costs.uniform(2, transfer=0.5))
    lanes = ("rank 0/compute", "rank 0/in", "rank 0/out", "rank 1/compute", "rank 1/in", "rank 1/out")
    assert found.timeline.lanes == lanes
    assert found.timeline.seconds == found.seconds
    assert [e.name for e in found.timeline.events if e.lane == "rank 1/compute"] == [
        *("1F0", "1B0", "1F1", "1B1", "1F2", "1B2")
    ]
    assert sum(e.kind == "send" for e in found.timeline.events) == len(found.moves) == 6


def test_early_arrivals_are_counted() -> None:
    spent = Costs.uniform(4, transfer=0.5)
    assert schedule("1f1b", stages=4, microbatches=16).simulate(spent).peak_inputs == (0, 1, 1, 1)
    assert schedule("eager-1f1b", stages=4, microbatches=16).simulate(spent).peak_inputs == (0, 2, 2, 2)


def test_what_was_lowered_can_be_run_with_other_costs() -> None:
    graph = StageGraph(4, (*chain(4).edges, Edge(0, 2, "skip"), Edge(0, 3, "skip")))
    low = lower(schedule("eager-1f1b", stages=4, microbatches=6), graph, costs=Costs.uniform(4, transfer=1.0))
    slow = simulate_lowered(low, Costs.uniform(4, transfer=3.0))
    assert slow.lowered is low
    assert {*slow.moves} == {*low.transfers}
    assert slow.seconds > simulate_lowered(low, Costs.uniform(4, transfer=1.0)).seconds


def test_a_shared_card_takes_turns() -> None:
    """Two edges that share no rank but a host's card: the second waits for the first."""
    graph = StageGraph(4, (Edge(0, 2), Edge(1, 3)))
    ones = (1.0,) * 4
    ranks = schedule("gpipe", stages=4, microbatches=1).ranks
    made = Schedule("pairs", 4, 1, ranks)
    alone = made.simulate(Costs(ones, ones, ones, ones, 2.0), graph)
    shared = made.simulate(Costs(ones, ones, ones, ones, 2.0, cards=((0,), (0,), (1,), (1,))), graph)
    assert alone.seconds == 1 + 2 + 1 + 1 + 2 + 1
    assert shared.seconds == alone.seconds + 2  # the second pair starts 2 later, and its gradient meets none
    assert shared.lower_bound <= shared.seconds


def test_passing_on_relieves_the_card_of_the_producer() -> None:
    """One tensor for three stages: 0 sends to 1, then 0 to 2 and 1 to 3 at once."""
    graph = StageGraph(4, tuple(Edge(0, user, "skip", gradient=False) for user in (1, 2, 3)))
    made = schedule("gpipe", stages=4, microbatches=1).forward_only()
    found = made.simulate(Costs.uniform(4, transfer=10.0), graph)
    assert found.seconds == 1 + 10 + 10 + 1
    assert [found.lowered.supplier(edge, 0) for edge in graph.edges] == [0, 0, 1]
    assert found.lower_bound == 1 + 10 + 1


def test_costs_of_reshard_plans() -> None:
    cluster = DeclaredCluster.uniform(3, gbps=8.0, latency=0.0)
    meshes = [Mesh.grid(1, 2, first_rank=2 * host, first_host=host) for host in range(3)]
    layouts = [Layout.parse(meshes[0], "S1R"), Layout.parse(meshes[1], "RR"), Layout.parse(meshes[2], "RS1")]
    shape = (1000, 250)  # 1 MB: a millisecond at 8 Gbit/s

    def plan(a: int, b: int) -> object:
        return plan_reshard(shape, torch.float32, src=layouts[a], dst=layouts[b], cluster=cluster)

    plans = {Edge(0, 1): plan(0, 1), Edge(1, 2): plan(1, 2)}
    gradients = {Edge(0, 1): plan(1, 0), Edge(1, 2): plan(2, 1)}
    measured = {"forward": [0.002] * 3, "input_gradient": [0.002] * 3, "weight_gradient": [0.002] * 3}
    spent = Costs.from_plans(**measured, plans=plans, gradient_plans=gradients)  # type: ignore[arg-type]
    assert spent.cards == ((0,), (1,), (2,))
    assert spent.backward == (0.004,) * 3
    for edge in plans:
        assert spent.of_transfer(edge, Direction.FORWARD) == plans[edge].seconds  # type: ignore[attr-defined]
        assert 0.001 <= spent.of_transfer(edge, Direction.FORWARD) < 0.0015
        assert spent.of_transfer(edge, Direction.GRADIENT) == gradients[edge].seconds  # type: ignore[attr-defined]
    found = schedule("eager-1f1b", stages=3, microbatches=8).simulate(spent)
    check(found)
    with pytest.raises(ValueError, match="no plan of an edge to or from stage 2"):
        Costs.from_plans(**measured, plans={Edge(0, 1): plans[Edge(0, 1)]})  # type: ignore[arg-type, dict-item]
    lacking = Costs(spent.forward, spent.backward, spent.forward, spent.forward, {Edge(0, 1): 1.0})
    with pytest.raises(ValueError, match="no forward seconds for the edge 1->2 x"):
        schedule("1f1b", stages=3, microbatches=2).simulate(lacking)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": (1.0,)}, "backward is"),
        ({"forward": (0.0, 1.0)}, "forward is"),
        ({"backward": (float("nan"), 1.0)}, "backward is"),
        ({"transfer": -1.0}, "transfer has -1.0"),
        ({"gradient_transfer": {Edge(0, 1): float("inf")}}, "gradient_transfer has inf"),
        ({"cards": ((0,),)}, "cards is"),
        ({"cards": ((0,), ())}, "cards is"),
    ],
)
def test_odd_costs_are_refused(options: dict[str, object], message: str) -> None:
    ones = (1.0, 1.0)
    given_costs = {"forward": ones, "backward": ones, "input_gradient": ones, "weight_gradient": ones} | options
    with pytest.raises(ValueError, match=message):
        Costs(**given_costs)  # type: ignore[arg-type]


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages for a schedule of 2"):
        schedule("1f1b", stages=2, microbatches=2).simulate(Costs.uniform(3))
