"""Plans as text, the recurrence against exhaustive search, and simulations that end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overlap_programs import plans

from weft.layout import DeclaredCluster
from weft.overlap import Curve, Curves, Op, OverlapPlan, plan_overlap
from weft.overlap.blocks import Axis
from weft.overlap.plan import Transport
from weft.overlap.search import (
    _shapes,
    best_groups,
    bound,
    choose_plan,
    neighbours,
    partitions,
    predict,
    predict_plan,
    predict_sequential,
    ranked_plans,
    simulated_seconds,
)
from weft.overlap.speeds import Work, slowest, subadditive, work_of

OPS = [Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.GATHER_BACK]


def curves(*, gbps: float = 1.0, latency: float = 2e-4, gflops: float = 80.0) -> Curves:
    wire = Curve.of_link(bytes_per_second=gbps / 8 * 1e9, latency=latency)
    return Curves(wire, gflops * 1e9, add_bytes=1e10, cpu_per_byte=5e-10, call_overhead=1e-4)


@given(plans(OPS), st.text("abc 0-9%,.", max_size=12).map(str.strip), st.none() | st.floats(1e-6, 10.0))
def test_plans_print_and_parse_back(p: OverlapPlan, reason: str, predicted: float | None) -> None:
    full = OverlapPlan(**{**vars(p), "reason": reason, "predicted": predicted})
    back = OverlapPlan.parse(str(full))
    assert back == full == p
    assert (back.reason, back.predicted) == (reason, predicted)
    assert back.digest == p.digest


@pytest.mark.parametrize("text", ["", "matmul_reduce_scatter", "x m=1 n=1 k=1"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a plan; expected"):
        OverlapPlan.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": (0,)}, "at least 1"),
        ({"hosts": (1,)}, "from 0"),
        ({"op": Op.ALL_GATHER, "axis": Axis.COLS}, "receives rows"),
        ({"tile_n": 33}, "multiple of 32"),
    ],
)
def test_bad_plans(change, message: str) -> None:
    good = {"op": Op.ALL_REDUCE, "m": 8, "n": 8, "k": 8, "dtype": "float32", "hosts": (0, 1)}
    with pytest.raises(ValueError, match=message):
        OverlapPlan(**{**good, **change})


def test_ranks_may_differ_in_their_own_dimension_only() -> None:
    p = OverlapPlan(Op.ALL_GATHER, 64, 100, 8, "float32", (0, 1))
    assert p.shared_text() == p.fit(m=64, n=99, k=8).shared_text()
    assert p.shared_text() != p.fit(m=64, n=100, k=9).shared_text()
    assert p.shared_text() != p.fit(m=63, n=100, k=8).shared_text()


# Curves -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 1.0)), min_size=2, max_size=6, unique_by=lambda p: p[0])
)
def test_cutting_a_message_never_pays_by_itself(points) -> None:
    curve = Curve(subadditive([(float(a), b) for a, b in sorted(points)]))
    for a, b in [(1, 1), (3, 50), (200, 300), (500, 999)]:
        assert curve(a) + curve(b) >= curve(a + b) * (1 - 1e-9)


def test_curves_travel_as_text_and_the_slowest_rank_counts() -> None:
    fast, slow = curves(), curves(gbps=0.5, gflops=60.0)
    assert Curves.from_json(fast.to_json()) == fast
    both = slowest([fast, slow])
    assert (both.flops, both.wire) == (slow.flops, slow.wire)


@pytest.mark.parametrize("points", [((1.0, 0.1),), ((2.0, 0.1), (1.0, 0.2)), ((1.0, -0.1), (2.0, 0.1))])
def test_bad_curves(points) -> None:
    with pytest.raises(ValueError, match="two or more"):
        Curve(points)


# The recurrence ---------------------------------------------------------------------------------------------

seconds = st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=9)


@st.composite
def works(draw) -> Work:
    compute = draw(seconds)
    sizes = st.one_of(st.just(0.0), st.floats(1e3, 1e6))
    nbytes = draw(st.lists(sizes, min_size=len(compute), max_size=len(compute)))
    return Work(tuple(compute), tuple(nbytes), draw(st.floats(0, 1e-2)), 0.0, 0.0, draw(st.booleans()))


def exhaustive_groups(work: Work, curves: Curves) -> tuple[int, ...]:
    """The best of all partitions by trying each; for few units."""
    return min(partitions(work.units), key=lambda groups: predict(work, groups, curves))


def pruned_groups(work: Work, curves: Curves, *, first: int = 2, last: int = 4) -> tuple[int, ...]:
    """The paper's search: a small first group and a small last one, and between them groups of one size each."""
    found: list[tuple[int, ...]] = [(work.units,)]
    for head in range(1, min(first, work.units) + 1):
        for tail in range(1, min(last, work.units - head) + 1):
            middle = work.units - head - tail
            for size in range(1, middle + 1):
                full, rest = divmod(middle, size)
                found.append((head, *[size] * full, *([rest] if rest else []), tail))
            if middle == 0:
                found.append((head, tail))
    return min(found, key=lambda groups: predict(work, groups, curves))


@settings(deadline=None, max_examples=200)
@given(works(), st.floats(0.01, 10.0), st.floats(1e-5, 5e-3), st.floats(0, 2e-9))
def test_the_dynamic_program_finds_the_optimum(work: Work, gbps: float, latency: float, cpu: float) -> None:
    c = replace(curves(gbps=gbps, latency=latency), cpu_per_byte=cpu)
    best = predict(work, best_groups(work, c), c)
    assert best <= predict(work, exhaustive_groups(work, c), c) * (1 + 1e-9)
    assert best <= predict(work, pruned_groups(work, c), c) * (1 + 1e-9)
    assert best >= bound(work, c) * (1 - 1e-9)


def test_partitions_are_all_of_them() -> None:
    assert len(set(partitions(6))) == 2**5
    assert all(sum(groups) == 6 for groups in partitions(6))


def test_one_group_is_the_sequential_time_when_time_runs_backwards_or_not() -> None:
    for backwards in (False, True):
        work = Work((1.0, 2.0), (1e6, 1e6), backwards=backwards)
        c = Curves(Curve.of_link(bytes_per_second=1e6, latency=0.5), 1.0, 1.0, 0.0, 0.0)
        assert predict(work, (2,), c) == pytest.approx(predict_sequential(work, c)) == pytest.approx(5.5)


@pytest.mark.parametrize("groups", [(1,), (2, 1), (0, 2)])
def test_groups_must_add_up(groups) -> None:
    with pytest.raises(ValueError, match="add up to 2"):
        predict(Work((1.0, 1.0), (1.0, 1.0)), groups, curves())


# Choosing and simulating ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [o.value for o in OPS])
def test_a_wire_worth_hiding_is_hidden(op: str) -> None:
    p = choose_plan(op, 2048, 3072, 768, dtype="float32", hosts=(0, 1), curves=curves(gbps=1.0))
    assert not p.sequential
    predicted = predict_plan(p, curves(gbps=1.0))
    assert predicted.bound < predicted.overlapped < 0.9 * predicted.sequential
    assert "ms predicted" in p.reason


@pytest.mark.parametrize(
    ("shape", "hosts", "link", "reason"),
    [
        ((2048, 3072, 768), (0,), {}, "only one rank"),
        ((64, 96, 16), (0, 1), {"latency": 5e-3}, "overlap would take"),
        ((0, 96, 16), (0, 1), {}, "nothing to overlap"),
    ],
)
def test_a_sequential_plan_says_why(shape, hosts, link, reason: str) -> None:
    p = choose_plan("matmul_reduce_scatter", *shape, dtype="float32", hosts=hosts, curves=curves(**link))
    assert p.sequential
    assert reason in p.reason


@pytest.mark.parametrize("op", [o.value for o in OPS])
def test_what_measurements_cannot_tell_is_not_overlapped(op: str) -> None:
    """A gain that is smaller than the measurements lie apart is none that anybody has seen."""
    known = curves(gbps=1.0)
    shape = (2048, 3072, 768)
    sure = choose_plan(op, *shape, dtype="float32", hosts=(0, 1), curves=known)
    gain = 1 - (sure.predicted or 0.0) / predict_plan(sure, known).sequential
    assert 0.1 < gain < 0.9
    still = choose_plan(op, *shape, dtype="float32", hosts=(0, 1), curves=replace(known, uncertainty=0.5 * gain))
    assert still == sure
    unsure = choose_plan(op, *shape, dtype="float32", hosts=(0, 1), curves=replace(known, uncertainty=1.5 * gain))
    assert unsure.sequential
    assert "measurements lay" in unsure.reason
    assert OverlapPlan.parse(str(unsure)).reason == unsure.reason


def test_a_reason_says_what_was_chosen() -> None:
    p = choose_plan("matmul_reduce_scatter", 2048, 3072, 768, dtype="float32", hosts=(0, 1), curves=curves(gbps=1.0))
    assert p.reason.startswith(f"{len(p.groups)} groups of rows: ")


@pytest.mark.parametrize("op", OPS)
def test_messages_after_the_matmul_take_nothing_from_it(op: Op) -> None:
    """Where all is computed first, or received first, no message meets a matmul: what it would take does not matter."""
    p = OverlapPlan(op, 512, 3072, 768, "float32", (0, 1))
    dear = replace(curves(gbps=1.0), cpu_per_byte=4e-9, cpu_per_message=1e-3)
    free = replace(dear, cpu_per_byte=0.0, cpu_per_message=0.0)
    assert simulated_seconds(p, dear) == pytest.approx(simulated_seconds(p, free))


def test_a_message_takes_from_the_matmul_only_while_both_last() -> None:
    """Half of the product travels while the other half is computed, for four times as long."""
    p = OverlapPlan(Op.ALL_REDUCE, 480, 3072, 768, "float32", (0, 1), tile_m=48, groups=(1, 1))
    free = replace(curves(gbps=0.1), cpu_per_byte=0.0, add_bytes=1e15)
    nbytes = 240 * 3072 * 4.0
    half, wire = work_of(p, free).compute / 2, free.wire(nbytes)
    assert wire > 4 * half
    dear = replace(free, cpu_per_byte=half / nbytes)  # a message takes half of `half` of each rank, over its time

    def computed(c: Curves) -> float:
        return max(e.end for e in p.simulate(c).events if e.lane == "rank 0/compute")

    late = computed(dear) - computed(free)
    assert 0 < late < half * (2 * half / wire)


@pytest.mark.parametrize("op", [o.value for o in OPS])
def test_a_declared_cluster_needs_no_group(op: str) -> None:
    cluster = DeclaredCluster((1.0, 2.0, 1.0))
    p = plan_overlap(op, 2048, 3072, 768, dtype=torch.bfloat16, cluster=cluster, devices=2, flops=8e10)
    assert p.hosts == (0, 0, 1, 1, 2, 2)
    assert p.dtype == "bfloat16"
    curves = Curves.of_cluster(cluster, flops=8e10)
    assert p == choose_plan(op, 2048, 3072, 768, dtype="bfloat16", hosts=p.hosts, curves=curves)
    assert p.simulate(curves).seconds > predict_plan(p, curves).matmul * 0.9


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "expected one of them"),
        ({"cluster": DeclaredCluster.uniform(2, gbps=1.0)}, "flops=None"),
        ({"cluster": DeclaredCluster.uniform(2, gbps=1.0), "flops": 0.0}, "flops=0.0"),
        ({"cluster": DeclaredCluster.uniform(2, gbps=1.0), "flops": 1e9, "devices": 0}, "devices=0"),
    ],
)
def test_a_plan_needs_to_know_where(given_, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_overlap("matmul_all_reduce", 8, 8, 8, **given_)


def test_few_rows_are_cut_by_columns() -> None:
    found = ranked_plans(OverlapPlan(Op.ALL_REDUCE, 16, 4096, 1024, "float32", (0, 1)), curves(gbps=0.5, latency=5e-5))
    assert found[0].axis is Axis.COLS


@settings(deadline=None, max_examples=60)
@given(plans(OPS))
def test_every_plan_simulates_to_an_end(p: OverlapPlan) -> None:
    timeline = p.simulate(curves())
    flops = p.m * p.n * p.k * 2
    places = {e.place for e in timeline.events}
    assert places <= {f"rank {r}" for r in range(p.size)}
    for rank in range(p.size):
        spent = sum(e.seconds for e in timeline.events if e.lane == f"rank {rank}/compute")
        assert spent >= flops / curves().flops * (1 - 1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 2)])
def test_simulation_and_recurrence_tell_the_same_story(op: Op, hosts: tuple[int, ...]) -> None:
    c = curves(gbps=1.0)
    p = choose_plan(op, 1536, 2048, 512, dtype="float32", hosts=hosts, curves=c)
    predicted = predict_plan(p, c)
    simulated = p.simulate(c).seconds
    assert simulated == pytest.approx(predicted.overlapped, rel=0.15)
    assert simulated >= work_of(p, c).compute * 0.9


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(OPS),
    st.sampled_from([(0, 1), (0, 0, 1, 1), (0, 1, 2)]),
    st.tuples(st.integers(40, 120), st.sampled_from([128, 512, 1024]), st.sampled_from([128, 768])),
    st.floats(0.1, 20.0),
    st.floats(1e-5, 2e-3),
    st.floats(6.0, 100.0),
    st.sampled_from([0.0, 3e-10, 1e-9]),
)
def test_the_chosen_plan_is_within_two_per_cent_of_the_best(op, hosts, shape, gbps, latency, gflops, cpu) -> None:
    """Against every partition of every shape that has few units, each simulated on all ranks."""
    c = replace(curves(gbps=gbps, latency=latency, gflops=gflops), cpu_per_byte=cpu)
    base = OverlapPlan(op, *shape, "float32", hosts, tile_n=min(512, shape[1]))
    chosen = simulated_seconds(ranked_plans(base, c)[0], c)
    best = simulated_seconds(replace(base, groups=()), c)
    for candidate in _shapes(base):
        units = work_of(candidate, c).units
        for groups in partitions(units) if units <= 6 else ():
            best = min(best, simulated_seconds(replace(candidate, groups=groups), c))
    assert chosen <= 1.02 * best


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_neighbours_are_other_partitions_of_as_many_units(groups: list[int]) -> None:
    found = list(neighbours(tuple(groups), sum(groups)))
    assert all(sum(other) == sum(groups) and min(other) >= 1 for other in found)
    assert tuple(groups) not in found
    assert len(found) > 0 or groups == [1]


def test_messages_only_cost_more_bytes_across_hosts_than_windows() -> None:
    c = curves()
    base = OverlapPlan(Op.REDUCE_SCATTER, 512, 1024, 256, "float32", (0, 0, 1, 1), groups=(1, 1, 1, 1))
    everywhere = OverlapPlan(**{**vars(base), "transport": Transport.MESSAGES})
    assert predict_plan(everywhere, c).wire > 1.5 * predict_plan(base, c).wire
