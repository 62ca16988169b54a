"""Ranks that are left of a group make a new one in the same processes, and it works; those that come late are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft.comm import Group
from weft.comm.host_collectives import HostGroup
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.layout import Layout, Mesh, Replicate, Shard
from weft.reshard import Source

DEADLINE = 2.0
# Lets a process go on after a while.
WAKER = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"


def everything_works(group: dist.ProcessGroup) -> None:
    """An overlapped matmul, a reshard, a host collective and torch's own, on values that differ everywhere."""
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(size)
    parts = [torch.randn(12, 5, generator=generator) for _ in range(size)]
    weights = [torch.randn(7, 5, generator=generator) for _ in range(size)]
    y = weft.matmul_all_reduce(parts[rank], weights[rank], group=group)
    torch.testing.assert_close(y, torch.stack([x @ w.T for x, w in zip(parts, weights, strict=True)]).sum(0))
    whole = torch.randn(9, 4, generator=generator)
    mesh, step = Mesh.of(dist.get_process_group_ranks(group), hosts=[0] * size), -(-9 // size)
    src = Source((9, 4), torch.float32, Layout(mesh, [Shard(0)]))
    mine = whole[rank * step : (rank + 1) * step].contiguous()
    moved = weft.reshard(mine, mesh, [Replicate()], src=src, group=Group(group, timeout=DEADLINE))
    assert torch.equal(moved, whole)
    total = HostGroup(group, bank_bytes=4096, timeout=DEADLINE).all_reduce(torch.full((3,), rank + 1.0))
    assert total.tolist() == [size * (size + 1) / 2] * 3
    dist.all_reduce(total, group=group)
    assert total.tolist() == [size * size * (size + 1) / 2] * 3


def broken_call(group: dist.ProcessGroup, victim: int, how: signal.Signals) -> None:
    """Calls until the victim is killed or stopped by its own hand."""
    for number in range(100):
        if group.rank() == victim and number == 3:
            os.kill(os.getpid(), how)
        weft.matmul_all_reduce(torch.ones(4, 3), torch.ones(2, 3), group=group)


def lose_one(victim: int) -> list[int]:
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=DEADLINE))
    with pytest.raises((PeerLost, PeerTimeout)):
        broken_call(group, victim, signal.SIGKILL)
    new = weft.survivors(group, timeout=2 * DEADLINE)
    everything_works(new)
    with pytest.raises(WeftError, match=r"given up by weft\.survivors"):
        weft.matmul_all_reduce(torch.ones(4, 3), torch.ones(2, 3), group=group)
    with pytest.raises(WeftError, match="a new one already"):
        weft.survivors(group)
    return dist.get_process_group_ranks(new)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed(victim: int) -> None:
    said = run_ranks(lose_one, 4, victim, killed=[victim])
    left = [rank for rank in range(4) if rank != victim]
    assert [said[rank] for rank in left] == [left] * 3


def lose_one_after_the_other() -> list[int]:
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=DEADLINE))
    before = threading.active_count()
    for victim in (3, 0, 0):  # by their rank in the group that is left
        with pytest.raises((PeerLost, PeerTimeout)):
            broken_call(group, victim, signal.SIGKILL)
        old, group = group, weft.survivors(group, timeout=2 * DEADLINE)
        dist.destroy_process_group(old)
        everything_works(group)
    assert threading.active_count() <= before + 6  # of one group, not of four
    return dist.get_process_group_ranks(group)


def test_until_one_is_left() -> None:
    assert run_ranks(lose_one_after_the_other, 4, killed=[0, 1, 3])[2] == [2]


def sleep_too_long() -> str:
    group = dist.new_group(list(range(3)), timeout=timedelta(seconds=DEADLINE))
    Group(group, timeout=DEADLINE).barrier("start")
    if group.rank() == 1:
        subprocess.Popen([sys.executable, "-ISc", WAKER, str(os.getpid()), str(3 * DEADLINE)])
    with pytest.raises((PeerLost, PeerTimeout)):
        broken_call(group, 1, signal.SIGSTOP)
    if group.rank() == 1:
        with pytest.raises(PeerLost, match="rank 1 was given up: ranks 0, 2 went on without it"):
            weft.survivors(group, timeout=DEADLINE)
        return "given up"
    new = weft.survivors(group, timeout=2 * DEADLINE)
    words = Group(new, timeout=5 * DEADLINE)
    while not dist.group.WORLD.get_group_store().check(["woken"]):  # the other one is at work meanwhile
        everything_works(new)
        words.barrier("again")
        if group.rank() == 0 and _was_told(group):
            dist.group.WORLD.get_group_store().set("woken", "")
        words.barrier("looked")
    everything_works(new)
    return "went on"


def _was_told(group: dist.ProcessGroup) -> bool:
    return bool(group.get_group_store().check(["weft/survivors/1/here/1"]))


def test_a_stopped_rank_wakes_up() -> None:
    assert run_ranks(sleep_too_long, 3) == ["went on", "given up", "went on"]


def late_but_alive() -> list[int]:
    """One finds out late, and is waited for: nothing says that it is dead."""
    group = dist.new_group(list(range(3)), timeout=timedelta(seconds=DEADLINE))
    words = Group(group, timeout=DEADLINE)
    words.barrier("start")
    if group.rank() == 2:
        threading.Event().wait(1.0)
    new = weft.survivors(group, timeout=5 * DEADLINE)
    everything_works(new)
    return dist.get_process_group_ranks(new)


def test_who_is_late_is_waited_for() -> None:
    assert run_ranks(late_but_alive, 3) == [[0, 1, 2]] * 3


def die_while_they_agree() -> list[int]:
    """A rank that is among those who go on dies before the new group is there: the rest agree once more."""
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=DEADLINE))
    Group(group, timeout=DEADLINE).barrier("start")
    if group.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank() == 1:
        from weft.comm import survivors as home

        home._make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, attr-defined]
    new = weft.survivors(group, timeout=2 * DEADLINE)
    everything_works(new)
    return dist.get_process_group_ranks(new)


def test_one_more_dies_meanwhile() -> None:
    said = run_ranks(die_while_they_agree, 4, killed=[1, 3])
    assert said[0] == said[2] == [0, 2]


def without_the_store() -> str:
    """The store was in the process of the rank that died."""
    rank, port = dist.get_rank(), dist.group.WORLD.get_group_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(port.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=DEADLINE))
    group = dist.group.WORLD
    Group(group, timeout=DEADLINE).barrier("start")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"hosts the group's store is gone.*must be started again"):
        weft.survivors(group, timeout=DEADLINE)
    return "told"


def test_the_store_is_gone() -> None:
    assert run_ranks(without_the_store, 3, killed=[0])[1:] == ["told", "told"]
