"""The overlapped ops across hosts: the same bits, traces, failures, and every system of the benchmark."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft import overlap
from weft.bench.systems.overlap import OverlapCase, Systems, cases, quick_cases
from weft.cli.lab import _ranks, _shape
from weft.comm import Group, PeerLost, Transfer
from weft.errors import PeerTimeout, RankFailed
from weft.lab import Cluster, Rank
from weft.overlap import Op, OverlapPlan
from weft.overlap.executor.context import context_of
from weft.timeline import record

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from overlap_cases import close, random_calls


def many_calls(rank: Rank, seeds: list[int]) -> int:
    return random_calls(seeds)


@pytest.mark.parametrize(("hosts", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_random_calls_across_hosts(namespaces: None, hosts: int, devices: int) -> None:
    with Cluster(hosts=hosts, devices=devices, gbps=1.0) as lab:
        seeds = list(range(10 * hosts + devices, 10 * hosts + devices + 24))
        assert lab.run(many_calls, seeds, timeout=200.0) == [4 * 24] * (hosts * devices)


def overlapped(rank: Rank) -> tuple[float, float, list[str]]:
    """A wire that takes as long as the matmul; blocks must be sent while others are computed."""
    m, n, k = 3072, 1024, 512
    x, w = torch.randn(m, k), torch.randn(n, k)
    plan = OverlapPlan(Op.REDUCE_SCATTER, m, n, k, "float32", rank.hosts, tile_m=192, groups=(1,) * 8)
    overlap.matmul_reduce_scatter(x, w, group=rank.group, plan=plan)
    with record.trace() as trace:
        overlap.matmul_reduce_scatter(x, w, group=rank.group, plan=plan)
    timeline = trace.timeline
    matmul = next(e for e in timeline.events if e.kind == "compute")
    during = [e for e in timeline.events if e.kind == "send" and e.start < matmul.end]
    return matmul.seconds, trace.summary().total.overlapped, [e.name for e in during]


def test_blocks_are_sent_during_the_matmul(namespaces: None) -> None:
    with Cluster(hosts=2, devices=1, gbps=0.5) as lab:
        for matmul, hidden, during in lab.run(overlapped):
            assert during, "blocks of the other rank's rows leave while the own rows are computed"
            assert 0 < hidden <= matmul


def die_in_the_middle(rank: Rank, op: str, folder: str) -> None:
    """The links take a third of a second for what must cross; the last rank is gone when its second message is due.

    The deadline is shorter than what the lab gives the others after a rank has died: they must end by themselves.
    """
    group = dist.new_group(list(range(rank.world)), timeout=timedelta(seconds=1.5))
    m, n, k = (1024, 16, 1024) if op == "all_gather_matmul" else (1024, 1024, 16)
    x, w = torch.ones(m // rank.world if op == "all_gather_matmul" else m, k), torch.ones(n, k)
    to = (torch.arange(m) % rank.world,) if op == "matmul_all_to_all" else ()
    plan = OverlapPlan(Op(op), m, n, k, "float32", rank.hosts, groups=(1,) * 4)

    def call() -> object:
        return getattr(overlap, op)(x, w, *to, group=group, plan=plan)

    call()
    call()
    if rank.rank == rank.world - 1:
        wire, sent = context_of(group).group, []

        def send(*args: object, **options: object) -> Transfer:
            sent.append(args)
            if len(sent) == 3:  # the first says that this rank is here, the second has just started
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        real, wire.send = wire.send, send
    try:
        call()
    except (PeerLost, PeerTimeout) as error:
        Path(folder, str(rank.rank)).write_text(str(error))
        return
    Path(folder, str(rank.rank)).write_text("the call ended well")


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_a_rank_killed_in_mid_transfer_ends_the_call_of_the_others(namespaces: None, op: str, tmp_path: Path) -> None:
    with Cluster(hosts=2, devices=1, gbps=0.05) as lab:
        with pytest.raises(RankFailed, match=r"rank 1 .*SIGKILL"):
            lab.run(die_in_the_middle, op, str(tmp_path), timeout=40.0)
        error = (tmp_path / "0").read_text()
        assert op in error
        assert "rank 1" in error
        assert lab.run(many_calls, [1], timeout=60.0) == [4] * 2, "and a new run is as good as ever"


def all_systems(rank: Rank, case: OverlapCase) -> bool:
    """Whether torch, the decomposed matmuls and weft compute the same rows."""
    systems = Systems(case, rank.group)
    systems.matmul()
    systems.wire(Group(rank.group, timeout=30.0))()
    want = systems.torch()
    rows = [systems.weft(None), systems.decomposed(rank.world), systems.decomposed(2 * rank.world)]
    if case.op is Op.ALL_GATHER:
        return all(close(got, want) for got in rows)
    # Chunks take the rows of each destination in another order: compare them sorted.
    return all(got.shape == want.shape and close(got.sort(0)[0], want.sort(0)[0]) for got in rows)


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL])
def test_every_system_of_the_benchmark_computes_the_same(cluster: Cluster, op: Op) -> None:
    case = OverlapCase(op, 2, 2, 1.0, m=64, k=32, n=48)
    assert cluster.run(all_systems, case, timeout=60.0) == [True] * 4


def test_links_are_as_slow_as_the_share_asks() -> None:
    case = OverlapCase(Op.REDUCE_SCATTER, 2, 1, 1.0, m=2048, k=768, n=3072)
    assert case.card_bytes == 4 * 1024 * 3072
    seconds = 2 * 2048 * 768 * 3072 / 80e9
    assert case.card_bytes * 8 / (case.gbps(80e9, 2) * 1e9) == pytest.approx(seconds)
    large = [case for case in cases() if not case.small]
    assert len(large) == (2 * 4 + 1) * 4 * 9
    assert len(list(cases())) - len(large) == 2 * (4 + 3 + 3)
    assert {c.op for c in quick_cases()} == {c.op for c in cases()}


def test_arguments_of_tune() -> None:
    assert _shape("matmul_all_reduce:8x16x32", "float32").n == 16
    assert _ranks("2x3") == (2, 3)
    for bad in ("matmul:8x16x32", "all_to_all_matmul:8x16x32", "matmul_all_reduce:8x16"):
        with pytest.raises(ValueError, match="expected OP:MxNxK"):
            _shape(bad, "float32")
    with pytest.raises(ValueError, match="HOSTSxDEVICES"):
        _ranks("4")
