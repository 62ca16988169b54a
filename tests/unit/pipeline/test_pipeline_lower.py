"""Sends and receives: each tensor once to each rank that uses it, from whoever has it, in an order that cannot hang."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_values import SIZES, costs, generated, graphs, listed
from pipeline_world import Hung, World, transfers_of

from weft.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Direction,
    Edge,
    Lowered,
    Receive,
    Schedule,
    Send,
    StageGraph,
    TensorTransfer,
    Transfers,
    chain,
    lower,
    schedule,
)


@st.composite
def lowered(draw: st.DrawFn, transfers: Transfers) -> Lowered:
    made = draw(generated())
    graph = draw(graphs(made.stages))
    return lower(made, graph, costs=draw(costs(made.stages, graph)), transfers=transfers)


def check_transfers(low: Lowered) -> None:
    """Who gets what from whom, against the stage graph alone."""
    made, graph = low.schedule, low.graph
    rank_of = made.rank_of
    forwards = [t for t in low.transfers if t.direction is Direction.FORWARD]
    to_rank = Counter((t.producer, t.tensor, t.microbatch, rank_of(t.target)) for t in forwards)
    edges = [(e, m) for e in graph.edges for m in range(made.microbatches) if rank_of(e.source) != rank_of(e.target)]
    assert set(to_rank) == {(e.source, e.tensor, m, rank_of(e.target)) for e, m in edges}
    assert set(to_rank.values()) <= {1}
    back = [t for t in low.transfers if t.direction is Direction.GRADIENT]
    wanted = [
        TensorTransfer(e.source, e.tensor, m, e.target, e.source) for e, m in edges if e.gradient and made.has_backward
    ]
    assert sorted(back) == sorted(wanted)
    users = {(e.source, e.tensor, e.target) for e in graph.edges}
    for t in forwards:
        assert (t.producer, t.tensor, t.target) in users
        assert t.source == t.producer or (t.producer, t.tensor, t.source) in users
    for rank, operations in enumerate(low.ranks):
        assert tuple(o for o in operations if isinstance(o, Action)) == made.ranks[rank]
        sends = {o.transfer for o in operations if isinstance(o, Send)}
        receives = {o.transfer for o in operations if isinstance(o, Receive)}
        assert sends == {t for t in low.transfers if rank_of(t.source) == rank}
        assert receives == {t for t in low.transfers if rank_of(t.target) == rank}
        assert len(sends) + len(receives) + len(made.ranks[rank]) == len(operations)
        assert set(transfers_of(low, rank)) == sends | receives


def check_suppliers(low: Lowered) -> None:
    """Every input can be had where `supplier` says, and was there before."""
    arrivals = {(t.producer, t.tensor, t.microbatch, t.target): t.source for t in low.transfers}
    for edge in low.graph.edges:
        for m in range(low.schedule.microbatches):
            stage, hops = low.supplier(edge, m), 0
            if low.schedule.rank_of(stage) != low.schedule.rank_of(edge.target):
                assert arrivals[edge.source, edge.tensor, m, edge.target] == stage
            while stage != edge.source:  # everybody who passes it on has it from somebody
                stage, hops = arrivals[edge.source, edge.tensor, m, stage], hops + 1
                assert hops < low.graph.stages


@given(lowered(Transfers.OVERLAPPED), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_random_graphs_overlapped(low: Lowered, seed: int) -> None:
    check_transfers(low)
    check_suppliers(low)
    World(low, seed).run_lists_in_order()
    World(low, seed).run_transfers_beside()
    assert Lowered.parse(str(low)) == low


@given(lowered(Transfers.SYNCHRONOUS), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_random_graphs_synchronous(low: Lowered, seed: int) -> None:
    check_transfers(low)
    check_suppliers(low)
    World(low, seed).run_lists_in_order()
    assert Lowered.parse(str(low)) == low


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_as_a_chain(name: str) -> None:
    for stages, microbatches in SIZES[::5]:
        low = lower(schedule(name, stages=stages, microbatches=microbatches))
        check_transfers(low)
        World(low, 0).run_lists_in_order()
        World(low, 1).run_transfers_beside()


def test_the_check_finds_a_list_that_hangs() -> None:
    low = lower(schedule("1f1b", stages=2, microbatches=2), transfers=Transfers.SYNCHRONOUS)
    first = low.ranks[1]
    late = (first[1], first[0], *first[2:])  # 1F0 before its receive
    with pytest.raises(Hung):
        World(Lowered(low.schedule, low.graph, (low.ranks[0], late), low.transfers), 0).run_lists_in_order()


def test_a_send_follows_its_action_and_a_synchronous_receive_precedes_its_own() -> None:
    for name in ("1f1b", "gpipe"):
        low = lower(schedule(name, stages=3, microbatches=5), transfers=Transfers.SYNCHRONOUS)
        for operations in low.ranks:
            for i, operation in enumerate(operations):
                before = [o for o in operations[:i] if isinstance(o, Action)]
                after = [o for o in operations[i:] if isinstance(o, Action)]
                if isinstance(operation, Send):
                    t = operation.transfer
                    letter = "F" if t.direction is Direction.FORWARD else "B"
                    assert str(before[-1]) == f"{t.source}{letter}{t.microbatch}"
                elif isinstance(operation, Receive):
                    t = operation.transfer
                    letter = "F" if t.direction is Direction.FORWARD else "B"
                    assert str(after[0]) == f"{t.target}{letter}{t.microbatch}"


SKIPS = StageGraph(4, (*chain(4).edges, Edge(0, 2, "skip"), Edge(0, 3, "skip")))


def test_a_skip_comes_from_the_producer_while_its_card_is_free() -> None:
    low = lower(schedule("gpipe", stages=4, microbatches=1), SKIPS, costs=Costs.uniform(4, transfer=0.25))
    assert low.supplier(Edge(0, 2, "skip"), 0) == 0
    assert low.supplier(Edge(0, 3, "skip"), 0) == 0


def test_a_skip_comes_from_an_earlier_user_while_the_producer_sends_something_else() -> None:
    graph = StageGraph(4, (*chain(4).edges, Edge(0, 1, "skip"), Edge(0, 3, "skip")))
    seconds = dict.fromkeys(graph.edges, 1.0) | {Edge(0, 1): 0.5, Edge(0, 1, "skip"): 0.25}
    stages = (1.0,) * 4
    slow = Costs((1.0, 4.0, 4.0, 4.0), stages, stages, stages, seconds)
    low = lower(schedule("gpipe", stages=4, microbatches=6), graph, costs=slow)
    suppliers = [low.supplier(Edge(0, 3, "skip"), m) for m in range(6)]
    assert set(suppliers) == {0, 1}
    assert [t for t in low.transfers if t.tensor == "skip" and t.target == 3 and t.microbatch == 0] == [
        TensorTransfer(0, "skip", 0, suppliers[0], 3)
    ]


def test_stages_of_one_rank_share_what_it_received() -> None:
    graph = StageGraph(4, (*chain(4).edges, Edge(0, 1, "skip"), Edge(0, 2, "skip"), Edge(0, 3, "skip")))
    low = lower(schedule("interleaved-1f1b", stages=4, microbatches=2, ranks=2), graph)
    assert [t.target for t in low.transfers if t.tensor == "skip" and t.direction is Direction.FORWARD] == [1, 1]
    assert [low.supplier(Edge(0, target, "skip"), 0) for target in (1, 2, 3)] == [0, 0, 1]
    back = sorted(t.source for t in low.transfers if t.tensor == "skip" and t.direction is Direction.GRADIENT)
    assert back == [1, 1, 3, 3]  # stage 2 is where the tensor was made


def test_what_has_no_gradient_does_not_come_back() -> None:
    graph = StageGraph(2, (Edge(0, 1), Edge(0, 1, "mask", gradient=False)))
    low = lower(schedule("1f1b", stages=2, microbatches=3), graph)
    assert Counter((t.tensor, t.direction.value) for t in low.transfers) == {
        ("x", "forward"): 3,
        ("x", "gradient"): 3,
        ("mask", "forward"): 3,
    }


def test_one_rank_sends_nothing_and_evaluation_sends_nothing_back() -> None:
    assert not lower(schedule("interleaved-1f1b", stages=3, microbatches=2, ranks=1)).transfers
    low = lower(schedule("eager-1f1b", stages=3, microbatches=2).forward_only())
    assert {t.direction for t in low.transfers} == {Direction.FORWARD}
    World(low, 0).run_transfers_beside()


def test_branches_without_a_chain() -> None:
    """Stages 1 and 2 on one rank, the later one first: the tensor arrives for that one."""
    ranks = listed("0F0 0B0", "2F0 1F0 1B0 2B0")
    graph = StageGraph(3, (Edge(0, 1), Edge(0, 2)))
    low = lower(Schedule("branches", 3, 1, ranks), graph)
    check_transfers(low)
    check_suppliers(low)
    assert low.supplier(Edge(0, 1), 0) == 2
    World(low, 0).run_lists_in_order()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lowered x: 1 micro-batches, 1 stages: no edges\n0F0",
        "lowered x: 1 micro-batches, 2 stages: 0->1 x\nrank 0\n0F0\nsend 0: 0.x#0 0->1\n0B0\nrank 1\n1F0\n1B0",
        "lowered x: 1 micro-batches, 1 stages: no edges\nrank 0\n0F0\nsend 0: nonsense\n0B0",
    ],
)
def test_a_text_that_is_not_lowered_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lowered.parse(text)
