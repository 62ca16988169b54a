"""Short calls across hosts: data that goes with the ranks' agreement, on both kinds of cards."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft import overlap
from weft.errors import PeerMismatch, RankFailed, WeftError
from weft.lab import Cluster, Rank
from weft.overlap import Op, OverlapPlan
from weft.overlap.blocks import chunk_bounds
from weft.overlap.executor.context import context_of
from weft.overlap.short import is_short
from weft.timeline import record

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from overlap_cases import random_calls

LONG = 60.0
"""A deadline that only a hang reaches."""


@pytest.fixture(scope="module", params=[("tcp", 2, 1), ("dma", 2, 1), ("tcp", 3, 1), ("dma", 2, 2)], ids=str)
def lab(request: pytest.FixtureRequest, namespaces: None) -> Iterator[Cluster]:
    cards, hosts, devices = request.param
    with Cluster(hosts=hosts, devices=devices, gbps=1.0, cards=cards) as cluster:
        yield cluster


def world_of(lab: Cluster) -> int:
    return lab.spec.hosts * lab.spec.devices


def sequential(op: Op, m: int, n: int, k: int, rank: Rank) -> OverlapPlan:
    return OverlapPlan(op, m, n, k, "float32", rank.hosts)


def inputs(
    seed: int, rank: Rank, m: int = 16, n: int = 48, k: int = 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's x and w, and the sum over ranks of their products."""
    own = torch.Generator().manual_seed(seed)
    xs, ws = torch.randn(rank.world, m, k, generator=own), torch.randn(rank.world, n, k, generator=own)
    return xs[rank.rank], ws[rank.rank], sum(x @ w.t() for x, w in zip(xs, ws, strict=True))


def is_right(seed: int, rank: Rank, group: dist.ProcessGroup, *, m: int = 16, n: int = 48) -> bool:
    x, w, want = inputs(seed, rank, m, n)
    plan = sequential(Op.ALL_REDUCE, m, n, x.shape[1], rank)
    assert is_short(plan)
    got = overlap.matmul_all_reduce(x, w, group=group, plan=plan)
    return torch.allclose(got, want, atol=1e-3)


def one_message_and_no_thread(rank: Rank) -> list[str]:
    """Each op by its short plan and cut into groups: the same bits; the first needs no thread of the executor."""
    group, m, n, k = rank.group, 20, 48, 24
    context, own = context_of(group), torch.Generator().manual_seed(rank.rank)
    shard = chunk_bounds(m, rank.world)
    rows = shard[rank.rank + 1] - shard[rank.rank]
    x, w, bias = torch.randn(m, k, generator=own), torch.randn(n, k, generator=own), torch.arange(n) / 7
    calls = {
        Op.ALL_REDUCE: lambda plan: overlap.matmul_all_reduce(x, w, group=group, bias=bias, plan=plan),
        Op.REDUCE_SCATTER: lambda plan: overlap.matmul_reduce_scatter(x, w, group=group, bias=bias, plan=plan),
        Op.ALL_GATHER: lambda plan: overlap.all_gather_matmul(x[:rows], w, group=group, bias=bias, m=m, plan=plan),
    }
    short = {}
    messages = []
    for op, call in calls.items():
        plan = sequential(op, m, n, k, rank)
        call(plan), call(plan)  # buffers of both banks
        with record.trace() as trace:
            short[op] = call(plan)
        messages += [event.name for event in trace.timeline.events if event.kind == "send"]
    assert context.sender._thread is None
    assert context.finisher._thread is None
    for op, call in calls.items():
        cut = OverlapPlan(op, m, n, k, "float32", rank.hosts, tile_m=4, groups=(1, 2))
        assert torch.equal(call(cut), short[op]), op
    return messages


def test_one_message_to_each_rank_of_another_host(lab: Cluster) -> None:
    found = lab.run(one_message_and_no_thread, timeout=100.0)
    remote = world_of(lab) - lab.spec.devices
    assert [len(messages) for messages in found] == [3 * remote] * world_of(lab)


def many_calls(rank: Rank, seeds: list[int]) -> int:
    return random_calls(seeds)


def test_random_calls(lab: Cluster) -> None:
    assert lab.run(many_calls, list(range(8)), timeout=200.0) == [4 * 8] * world_of(lab)


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def differ(rank: Rank, what: str) -> str:
    """The last rank is about to do something else: of another length, of another kind, or too long to ride."""
    group, odd = rank.group, rank.rank == rank.world - 1
    context_of(group)
    m, n, op, groups = 16, 48, Op.ALL_REDUCE, ()
    if what == "shorter":
        m = 1 if odd else 16
    elif what == "longer":
        n = 512 if odd else 48
    elif what == "op":
        op = Op.REDUCE_SCATTER if odd else op
    elif what == "too long to ride":
        m, n = (512, 512) if odd else (m, n)
    elif what == "in groups":
        groups = (1, 1) if odd else ()
    good = [is_right(seed, rank, group) for seed in range(2)]
    plan = OverlapPlan(op, m, n, 24, "float32", rank.hosts, tile_m=8, groups=groups)
    with pytest.raises(PeerMismatch) as info:
        getattr(overlap, op.value)(torch.randn(m, 24), torch.randn(n, 24), group=group, plan=plan)
    good += [is_right(seed, rank, group, m=m, n=n) for seed, m, n in ((2, 16, 48), (3, 5, 40), (4, 16, 48))]
    assert all(good), good
    return str(info.value)


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("shorter", ("m=16", "m=1 ")),
        ("longer", ("n=48", "n=512")),
        ("op", ("matmul_all_reduce", "matmul_reduce_scatter")),
        ("too long to ride", ("m=16", "m=512")),
        ("in groups", ("groups=sequential", "groups=1,1")),
    ],
)
def test_ranks_that_differ_are_told_both_sides(lab: Cluster, what: str, sides: tuple[str, str]) -> None:
    for text in lab.run(differ, what, timeout=60.0):
        assert "rank 0" in text
        assert all(side in text for side in sides), text


def with_refusals(rank: Rank) -> bool:
    """Calls that only some ranks make, and that are refused there, between calls of several lengths."""
    dice, shared, right = random.Random(rank.rank), random.Random(7), True
    for seed in range(30):
        for _ in range(dice.choice([0, 0, 1, 2])):
            with pytest.raises(ValueError, match="is not a plan"):
                overlap.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group=rank.group, plan="no plan")
        right &= is_right(seed, rank, rank.group, m=shared.choice([1, 7, 16]), n=shared.choice([8, 48]))
    return right


def test_refused_calls_in_between(lab: Cluster) -> None:
    assert lab.run(with_refusals, timeout=60.0) == [True] * world_of(lab)


def in_two_threads(rank: Rank) -> list[bool]:
    groups = [dist.new_group(list(range(rank.world))) for _ in range(2)]
    results: list[bool] = []

    def repeat(number: int) -> None:
        results.append(all(is_right(20 * number + i, rank, groups[number], m=1 + i) for i in range(16)))

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return results


def test_two_groups_at_once(lab: Cluster) -> None:
    assert lab.run(in_two_threads, timeout=100.0) == [[True, True]] * world_of(lab)


# ---- failures --------------------------------------------------------------------------------------------------------


def die(rank: Rank, folder: str) -> None:
    group = dist.new_group(list(range(rank.world)), timeout=timedelta(seconds=3.0))
    assert is_right(0, rank, group)
    assert is_right(1, rank, group)
    if rank.rank == rank.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(WeftError) as info:
        is_right(2, rank, group)
    with pytest.raises(WeftError, match="make a new group"):
        is_right(3, rank, group)
    Path(folder, str(rank.rank)).write_text(f"{type(info.value).__name__}: {info.value}")


@pytest.mark.parametrize("cards", ["tcp", "dma"])
def test_a_rank_that_dies(namespaces: None, cards: str, tmp_path: Path) -> None:
    with Cluster(hosts=3, devices=1, gbps=1.0, cards=cards) as cluster, pytest.raises(RankFailed):
        cluster.run(die, str(tmp_path), timeout=60.0)
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert "matmul_all_reduce" in text
        assert "rank 2" in text
