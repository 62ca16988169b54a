"""Plans: every byte once, loads at the bound, the paper's table, text that reads back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_values import specs
from torch.distributed.tensor import Replicate

from weft.bench.reshard import CASES, PAPER, ReshardCase, llama_state
from weft.layout import DeclaredCluster, Layout, Mesh
from weft.reshard import STRATEGIES, Plan, TensorSpec, plan_reshard, plan_tensors
from weft.reshard.executor.script import ScriptWriter
from weft.reshard.planner import paper_schedule
from weft.reshard.senders import Piece, assign_balanced, lower_bound, whole
from weft.reshard.spec import hosts_by_rank
from weft.reshard.units import find_demands, find_units

# Every byte once --------------------------------------------------------------------------------------------


def coverage(plan: Plan) -> None:
    """Every rank of the destination gets every byte of its boxes exactly once, from a rank that has it."""
    streams, chunks, hops = plan.streams, plan.chunks, plan.hops
    for stream in range(len(streams)):
        terms = streams.holder_sets[streams.holders[stream]]
        has = {rank: [] for rank in streams.taker_sets[streams.takers[stream]]}
        for rank in has if len(terms) == 1 else ():
            if rank in terms[0]:
                has[rank].append((0, int(streams.nbytes[stream])))
        for chunk in np.nonzero(chunks.stream == stream)[0].tolist():
            span = (int(chunks.start[chunk]), int(chunks.stop[chunk]))
            for taker in follow(plan, chunk, terms):
                has[taker].append(span)
        for rank, spans in has.items():
            assert tile_exactly(spans, int(streams.nbytes[stream])), (stream, rank, spans)
    assert set(hops.chunk.tolist()) == set(range(len(chunks))), "a chunk that goes nowhere"


def follow(plan: Plan, chunk: int, terms: tuple[tuple[int, ...], ...]) -> list[int]:
    """Goes along the hops of a chunk; the ranks that it ends at."""
    hops = plan.hops
    where = np.nonzero(hops.chunk == chunk)[0].tolist()
    holds = dict.fromkeys(terms[0], 1)  # terms that are reduced there so far, in order
    reached: list[int] = []
    for h in where:
        a, b = int(hops.sender[h]), int(hops.receiver[h])
        if hops.adds[h]:
            assert b in terms[holds[a]], "terms are reduced in order"
            holds[b] = holds[a] + 1
            arrived = holds[b] == len(terms)
        else:
            assert holds.get(a) == len(terms), "sent by a rank that has it"
            holds[b] = len(terms)
            arrived = True
        if arrived:
            reached += [r.takers for r in all_of(plan, b) if r.chunk == chunk][-1]
    return reached


def all_of(plan: Plan, rank: int) -> list[object]:
    script = ScriptWriter(plan).of(rank)
    return [*script.receives, *(send for send in script.sends if send.takers)]


def tile_exactly(spans: list[tuple[int, int]], size: int) -> bool:
    end = 0
    for a, b in sorted(spans):
        if a != end or b <= a:
            return size == 0
        end = b
    return end == size


@settings(max_examples=60, deadline=None)
@given(specs(), st.sampled_from(sorted(STRATEGIES)))
def test_every_byte_arrives_once(spec: TensorSpec, strategy: str) -> None:
    plan = plan_tensors([spec], strategy=strategy, chunk_bytes=1024)
    coverage(plan)
    assert Plan.parse(str(plan)) == plan


def test_the_bound_counts_whole_bytes() -> None:
    """Four bytes from one host to five others: a third of a byte cannot be sent, so a card is busy with four."""
    one, six = Mesh((0,), (1,), (0,), ("a0",)), Mesh(tuple(range(6)), (2, 3), tuple(range(6)), ("a0", "a1"))
    src, dst = Layout(one, [Replicate()]), Layout(six, [Replicate()] * 2)
    tensor = TensorSpec("x", (), torch.float32, src, dst, torch.float32)
    cluster = DeclaredCluster.uniform(6, gbps=1.0, latency=0.0)
    assert plan_tensors([tensor], cluster=cluster).lower_bound == pytest.approx(4 / cluster.rate(0))


@settings(max_examples=60, deadline=None)
@given(st.lists(specs(), min_size=1, max_size=3), st.sampled_from(sorted(STRATEGIES)))
def test_no_deadlock_and_no_plan_beats_the_bound(tensors: list[TensorSpec], strategy: str) -> None:
    hosts = {}
    same = [t for t in tensors if all(hosts.setdefault(r, h) == h for r, h in hosts_by_rank([t]).items())]
    cluster = DeclaredCluster.uniform(8, gbps=1.0, latency=0.0)
    plan = plan_tensors(same, cluster=cluster, strategy=strategy, chunk_bytes=1024)
    assert plan.seconds >= plan.lower_bound * (1 - 1e-9)
    busiest = max(max(card.out, card.into) for card in plan.bytes_by_card.values())
    assert busiest / cluster.rate(0) >= plan.lower_bound * (1 - 1e-9) - 1e-9


@settings(max_examples=60, deadline=None)
@given(specs(partial=False))
def test_optimal_loads_no_card_beyond_the_bound(spec: TensorSpec) -> None:
    cluster = DeclaredCluster.uniform(8, gbps=1.0)
    plan = plan_tensors([spec], cluster=cluster, chunk_bytes=1024)
    most = max(max(card.out, card.into) for card in plan.bytes_by_card.values())
    slack = 64 * spec.wire_dtype.itemsize * 16  # cuts lie at even places
    assert most <= plan.lower_bound * cluster.rate(0) + slack


# The paper --------------------------------------------------------------------------------------------------

TABLE = [  # naive, balanced, ordered, bound: fractions of the whole tensor over one card
    (PAPER[0], 0.50, 0.50, 0.50, 0.50),
    (PAPER[1], 1.0, 0.50, 0.50, 0.50),
    (PAPER[2], 0.75, 0.75, 0.50, 0.50),
    (PAPER[3], 0.94, 0.94, 0.50, 0.50),
    (PAPER[4], 1.0, 0.75, 0.50, 0.50),
    (PAPER[5], 1.0, 1.0, 0.50, 0.50),
    (PAPER[6], 1.0, 1.0, 1.0, 1.0),
    (PAPER[7], 0.75, 0.75, 0.50, 0.50),
]


@pytest.mark.parametrize(("case", "naive", "balanced", "ordered", "bound"), TABLE, ids=lambda x: getattr(x, "name", ""))
def test_the_table_of_the_paper(case: ReshardCase, naive: float, balanced: float, ordered: float, bound: float) -> None:
    spec = case.spec()
    cluster = DeclaredCluster.uniform(case.hosts, gbps=spec.nbytes * 8e-9)  # the whole tensor takes one second
    _, streams = find_units([spec])
    demands = find_demands(streams, hosts_by_rank([spec]), merge=False)

    first = [whole(i, demand, demand.sources[0], relay=True) for i, demand in enumerate(demands.demands)]
    least_busy = assign_balanced(demands.demands, relay=True, rates=cluster.rates)

    def seconds(pieces: list[Piece], *, search: bool) -> float:
        return round(paper_schedule(demands, pieces, cluster, search=search).seconds, 2)

    assert seconds(first, search=False) == naive
    assert seconds(least_busy, search=False) == balanced
    assert seconds(least_busy, search=True) == ordered
    assert round(lower_bound([spec], cluster), 2) == bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_optimal_is_planned_at_the_bound(case: ReshardCase) -> None:
    cluster = DeclaredCluster.uniform(case.hosts, gbps=1.0, latency=0.0)
    plan = plan_tensors([case.spec()], cluster=cluster)
    longest_chain = case.dst[0]
    one_chunk = plan.chunk_bytes / cluster.rate(0)
    assert plan.seconds <= plan.lower_bound + 4 * longest_chain * one_chunk
    others = [plan_tensors([case.spec()], cluster=cluster, strategy=name).seconds for name in STRATEGIES]
    assert plan.seconds <= min(others) * 1.03


def test_one_to_many_is_a_pipelined_chain() -> None:
    case = CASES[-1]
    plan = plan_tensors([case.spec()], cluster=DeclaredCluster.uniform(5, gbps=1.0, latency=0.0))
    late = plan.seconds - plan.lower_bound
    assert late == pytest.approx(3 * plan.chunk_bytes / 125e6, rel=0.01), "three hosts pass on, one chunk each"


# Values -----------------------------------------------------------------------------------------------------


def test_bytes_on_the_right_host_cross_no_card() -> None:
    mesh = Mesh.grid(2, 4)
    plan = plan_reshard((64, 64), torch.float32, src=Layout.parse(mesh, "S0R"), dst=Layout.parse(mesh, "S01R"))
    assert all((card.out, card.into) == (0, 0) for card in plan.bytes_by_card.values())
    assert len(plan.hops) == 0, "each rank has its part already"
    plan = plan_reshard((64, 64), torch.float32, src=Layout.parse(mesh, "S01R"), dst=Layout.parse(mesh, "S0R"))
    assert all((card.out, card.into) == (0, 0) for card in plan.bytes_by_card.values())
    assert (plan.hops.sender == plan.hops.receiver).all(), "shared inside the hosts"
    assert plan.lower_bound == 0.0


def test_a_sum_crosses_each_card_once() -> None:
    mesh = Mesh.grid(4, 2)
    src, dst = Layout.parse(mesh, "RP0P1"), Layout.parse(Mesh.grid(1, 1, first_rank=8, first_host=4), "R")
    plan = plan_reshard((1 << 16,), torch.float32, src=src, dst=dst)
    assert {(card.out, card.into) for card in plan.bytes_by_card.values()} == {
        (1 << 18, 0),
        (1 << 18, 1 << 18),
        (0, 1 << 18),
    }


def test_cards_of_different_rates_share_by_rate() -> None:
    src, dst = Mesh.grid(2, 1), Mesh.grid(1, 1, first_rank=2, first_host=2)
    cluster = DeclaredCluster((1.0, 3.0, 100.0))
    plan = plan_reshard(
        (1 << 20,), torch.uint8, src=Layout.parse(src, "R"), dst=Layout.parse(dst, "R"), cluster=cluster
    )
    cards = plan.bytes_by_card
    assert cards[1].out == pytest.approx(3 * cards[0].out, rel=0.01)
    assert plan.lower_bound == pytest.approx((1 << 20) * 8 / 4e9, rel=0.001)


def test_a_model_is_one_plan() -> None:
    state = llama_state(scale=4)
    plan = plan_tensors(state, cluster=DeclaredCluster.uniform(3, gbps=1.0))
    assert len(state) == 150
    assert plan.seconds <= plan.lower_bound * 1.05
    assert Plan.parse(str(plan)) == plan
    coverage(plan)


def test_a_cast_travels_in_the_narrower_type() -> None:
    src, dst = Layout.parse(Mesh.grid(1, 1), "R"), Layout.parse(Mesh.grid(1, 1, first_rank=1, first_host=1), "R")
    for dtype, other in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]:
        plan = plan_reshard((100,), dtype, src=src, dst=dst, dst_dtype=other)
        assert plan.bytes_by_card[1].into == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "fast"}, "expected one of send_recv"),
        ({"chunk_bytes": 10}, "expected 1024 or more"),
        ({"cluster": DeclaredCluster.uniform(1, gbps=1.0)}, "the cluster has 1 hosts"),
        ({"dst": Layout.parse(Mesh.grid(1, 2), "RP1")}, "expected Shard or Replicate"),
        ({"dst": Layout.parse(Mesh.of([[0]], hosts=[[7]]), "R")}, "rank 0 is on host 0 in one mesh and on host 7"),
        ({"dst": Layout.parse(Mesh.grid(2, 1), "RS1")}, "has 1 dims"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    options = {"src": Layout.parse(Mesh.grid(2, 1), "S0"), "dst": Layout.parse(Mesh.grid(2, 1), "R"), **change}
    with pytest.raises(ValueError, match=message):
        plan_reshard((8,), torch.float32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [0, 1, 4, -1])
def test_a_damaged_text_is_refused(line: int) -> None:
    spec = PAPER[6].spec()
    lines = str(plan_tensors([spec])).splitlines()
    lines[line] = "?" + lines[line]
    with pytest.raises(ValueError, match="expected"):
        Plan.parse("\n".join(lines))
