"""Resharding between hosts with cards of their own: what crosses each card is what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm import Group
from weft.errors import PeerMismatch
from weft.lab import Cluster as Lab
from weft.lab import Rank
from weft.layout import DeclaredCluster, Layout, Mesh, Shard
from weft.reference import shard
from weft.reshard import STRATEGIES, Executor, Source, TensorSpec, plan_reshard, plan_tensors

SHAPE = (256, 256, 8)
OVERHEAD = 1.04  # headers, acknowledgements, and messages that arrange the others


def move(rank: Rank, spec: TensorSpec, strategy: str) -> tuple[int, int]:
    """Moves once, compares the values, and returns what crossed this rank's card."""
    plan = plan_tensors([spec], cluster=DeclaredCluster.uniform(4, gbps=1.0), strategy=strategy)
    whole = torch.arange(SHAPE[0] * SHAPE[1] * SHAPE[2], dtype=torch.float32).reshape(SHAPE)
    sources, targets = shard(whole, spec.src), shard(whole, spec.dst)
    group = Group(rank.group, timeout=60.0)
    with Executor(plan, group) as executor:
        before = rank.carried()
        dist.barrier()  # or another rank of this host would send before this one has looked
        dst = {0: torch.empty_like(targets[rank.rank])} if rank.rank in targets else {}
        executor.run({0: sources[rank.rank]} if rank.rank in sources else {}, dst)
        dist.barrier()
        after = rank.carried()
    assert all(torch.equal(tensor, targets[rank.rank]) for tensor in dst.values())
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture(scope="module", params=["tcp", "dma"])
def lab(namespaces: None, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(hosts=4, devices=2, gbps=1.0, cards=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize(("src", "dst"), [("S0RR", "RS0R"), ("RS1R", "RRR"), ("RRR", "S01RR")])
def test_cards_carry_what_the_plan_says(lab: Lab, src: str, dst: str, strategy: str) -> None:
    a, b = Mesh.grid(2, 2), Mesh.grid(2, 2, first_rank=4, first_host=2)
    spec = TensorSpec("x", SHAPE, torch.float32, Layout.parse(a, src), Layout.parse(b, dst), torch.float32)
    planned = plan_tensors([spec], cluster=DeclaredCluster.uniform(4, gbps=1.0), strategy=strategy).bytes_by_card
    for rank, (out, into) in enumerate(lab.run(move, spec, strategy, timeout=120.0)):
        expected = planned[rank // 2]
        for measured, bytes_planned in ((out, expected.out), (into, expected.into)):
            slack = 150_000  # acknowledgements of the other direction, barriers
            assert bytes_planned <= measured <= bytes_planned * OVERHEAD + slack, (rank, strategy)


def in_flight(rank: Rank, beside: str) -> int:
    """Several moves of equal shapes between the hosts at once, waited for in another order on each rank."""
    me, mesh = rank.rank, Mesh.of([0, 1, 2, 3], hosts=[0, 0, 1, 1])
    src, dst = Layout(mesh, [Shard(0)]), Layout(mesh, [Shard(1)])
    wholes = [torch.randn(1024, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    group = Group(rank.group, timeout=60.0)
    plan = plan_reshard((1024, 512), torch.float32, src=src, dst=dst, chunk_bytes=1 << 14)
    wrong = 0
    with ExitStack() as stack:
        executors = [stack.enter_context(Executor(plan, group)) for _ in wholes]  # so that all start at once
        for round in range(3):
            outs = [torch.zeros(1024, 128) for _ in wholes]
            moves = zip(executors, wholes, outs, strict=True)
            under_way = [each.start({0: whole.chunk(4)[me].clone()}, {0: out}) for each, whole, out in moves]
            if beside == "matmul":
                parts = [torch.randn(64, 32, generator=torch.Generator().manual_seed(9 + r)) for r in range(4)]
                y = weft.matmul_all_reduce(parts[me], parts[me][:16], group=rank.group)
                wrong += not torch.allclose(y, sum(part @ part[:16].t() for part in parts), atol=1e-3)
            elif beside == "refusal":
                with suppress(ValueError, PeerMismatch):
                    known = Source((1024, 512), torch.float32, src)
                    weft.reshard(wholes[0], mesh, [Shard(1)], src=known, timeout=60.0)
            elif beside == "reshard":
                known = Source((1024, 512), torch.float32, src)
                handle = weft.reshard(wholes[0].chunk(4)[me], mesh, [Shard(1)], src=known, async_op=True, timeout=60.0)
                wrong += int((handle.wait() != wholes[0].chunk(4, dim=1)[me]).sum())
            for number in sorted(range(3), key=lambda number: (number * (me + 1) + round) % 3):
                under_way[number].wait()
                wrong += int((outs[number] != wholes[number].chunk(4, dim=1)[me]).sum())
    return wrong


@pytest.mark.parametrize("beside", ["", "matmul", "refusal", "reshard"])
def test_several_under_way_between_hosts(cluster: Lab, beside: str) -> None:
    assert cluster.run(in_flight, beside, timeout=120.0) == [0] * 4
