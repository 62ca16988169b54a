"""Programs of torch and weft on DMA cards, unchanged; and what happens when ranks die, stop or disagree."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.comm import Group
from weft.errors import PeerLost, PeerTimeout, RankFailed
from weft.lab import Cluster, Rank
from weft.lab.card import why_staged


@pytest.fixture(scope="module")
def lab(namespaces: None) -> Iterator[Cluster]:
    with Cluster(hosts=2, devices=2, gbps=10.0, cards="dma", latency_us=5.0) as cluster:
        yield cluster


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def losses(net: nn.Module, rank: int) -> list[float]:
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = net(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item())
    return found


def data_parallel(rank: Rank, kind: str) -> list[float]:
    net = model()
    if kind == "ddp":
        return losses(DistributedDataParallel(net), rank.rank)
    for layer in net:
        fully_shard(layer)
    return losses(fully_shard(net), rank.rank)


@pytest.fixture(scope="module")
def gloo_losses() -> list[float]:
    with Cluster(hosts=2, devices=2, gbps=None) as cluster:
        return cluster.run(data_parallel, "ddp")[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_training(lab: Cluster, gloo_losses: list[float], kind: str) -> None:
    for found in lab.run(data_parallel, kind):
        assert found == pytest.approx(gloo_losses, rel=1e-5)


def tensor_parallel(rank: Rank) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    whole = model()(x)
    mesh: DeviceMesh = rank.mesh["device"]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    assert torch.allclose(parallelize_module(model(), mesh, plan)(x), whole, atol=1e-5)
    ours = {"0": weft.ColwiseOverlap(), "2": weft.RowwiseOverlap()}
    rows = x[None, 8 * rank.host : 8 * rank.host + 8]  # of a sequence that hosts share
    found = parallelize_module(model(), rank.mesh["host"], ours)(rows)
    assert torch.allclose(found[0], whole[8 * rank.host : 8 * rank.host + 8], atol=1e-5)
    cut = distribute_tensor(x, rank.mesh, [Shard(0), Replicate()])
    assert torch.equal(weft.reshard(cut, rank.mesh, [Replicate(), Shard(1)]).full_tensor(), x)


def test_dtensors_and_weft(lab: Cluster) -> None:
    lab.run(tensor_parallel)


def two_groups_of_weft(rank: Rank) -> None:
    torch.manual_seed(rank.rank)
    x, w = torch.randn(96, 40), torch.randn(56, 40)
    expected = x @ w.T
    dist.all_reduce(expected)
    for _ in range(3):
        y = weft.matmul_all_reduce(x, w, group=rank.group)
    assert torch.allclose(y, expected, atol=1e-3)
    first = torch.empty_like(y) if rank.rank else y.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, y)


def test_an_overlapped_matmul(lab: Cluster) -> None:
    lab.run(two_groups_of_weft)


# ---- failures --------------------------------------------------------------------------------------------------------


def of_different_sizes(rank: Rank) -> str:
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match=r"this rank has 44 bytes for it, the other one 40"):
            dist.send(torch.zeros(11), 1)
        dist.send(torch.arange(10.0), 1)
    if rank.rank == 1:
        with pytest.raises(RuntimeError, match=r"this rank has 40 bytes for it, the other one 44"):
            dist.recv(torch.zeros(10), 0)
        room = torch.full((12,), 7.0)  # more than comes: as on gloo, the rest stays as it is
        dist.recv(room, 0)
        assert room.tolist() == [*map(float, range(10)), 7.0, 7.0]
    dist.barrier()
    return "fine"


def test_sizes_that_differ_are_an_error_on_both_sides_and_the_group_goes_on(lab: Cluster) -> None:
    assert lab.run(of_different_sizes) == ["fine"] * 4


def waits_in_vain(rank: Rank) -> str:
    """Rank 0 gives up a wait: everybody who waits for it hears of it at once, and a new group works."""
    other = dist.new_group(timeout=timedelta(seconds=60))
    start = time.monotonic()
    if rank.rank == 0:
        group = Group(other, timeout=60.0)
        transfer = group.recv(torch.zeros(1), 1, tag=5)
        with pytest.raises(PeerTimeout):
            transfer.wait(what="nothing", timeout=0.3)
        with pytest.raises(PeerLost):
            group.send(torch.zeros(1), 1, tag=6).wait(what="after that")
    else:
        Group(other, timeout=60.0)
        with pytest.raises(RuntimeError, match="closed by peer"):
            other.recv([torch.zeros(1)], 0, 99).wait()
    assert time.monotonic() - start < 50.0  # not by its deadline
    dist.barrier(dist.new_group())
    return "fine"


def test_a_wait_that_ends_closes_the_connections_as_gloo_does(lab: Cluster) -> None:
    assert lab.run(waits_in_vain) == ["fine"] * 4


def dies(rank: Rank, how: str) -> str:
    x = torch.ones(3_000_000)
    dist.barrier()
    if rank.rank == 2:
        if how == "idle":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.isend(x, 0)
        dist.isend(x, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(x, 2)
        return "received"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("how", ["idle", "sending"])
def test_a_rank_that_dies_ends_what_waits_for_it(lab: Cluster, how: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 2 .* killed by SIGKILL") as error:
        lab.run(dies, how)
    assert "still running" not in str(error.value)


def is_stopped(rank: Rank) -> str:
    """Rank 3 is stopped: who waits for it does so until its deadline; the others go on, and so does it."""
    dist.barrier()
    pids: list[int] = [0] * rank.world
    dist.all_gather_object(pids, os.getpid())
    three = dist.new_group([0, 1, 2])
    if rank.rank == 0:
        os.kill(pids[3], signal.SIGSTOP)
        while Path(f"/proc/{pids[3]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # its threads stop one by one
        x = torch.zeros(1000)
        with pytest.raises(RuntimeError, match="Timed out waiting 500ms for send to rank 3"):
            rank.group.send([x], 3, 1).wait(timedelta(milliseconds=500))
    if rank.rank < 3:
        x = torch.ones(50_000)
        dist.all_reduce(x, group=three)
        assert x[0] == 3
    if rank.rank == 0:
        os.kill(pids[3], signal.SIGCONT)
    if rank.rank == 3:
        with pytest.raises(RuntimeError, match="closed by peer"):
            dist.recv(torch.zeros(1000), 0, tag=1)
    return "fine"


def test_a_rank_that_is_stopped(lab: Cluster) -> None:
    assert lab.run(is_stopped) == ["fine"] * 4


def test_memory_is_read_here_or_the_reason_is_known() -> None:
    reason = why_staged()
    assert reason is None or reason


def staged(rank: Rank) -> bool:
    x = torch.arange(500_000.0) + rank.rank
    dist.all_reduce(x)
    assert torch.equal(x, torch.arange(500_000.0) * rank.world + sum(range(rank.world)))
    group: object = rank.group
    return group.reads_memory  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("is_staged", [False, True])
def test_messages_through_shared_memory(namespaces: None, is_staged: bool) -> None:
    """As where a kernel forbids to read other processes."""
    cluster = Cluster(hosts=2, devices=1, gbps=10.0, cards="dma")
    cluster.spec = replace(cluster.spec, is_staged=is_staged)
    with cluster:
        assert cluster.run(staged) == [not is_staged and why_staged() is None] * 2
