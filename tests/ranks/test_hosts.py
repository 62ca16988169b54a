"""Which ranks share a host: found out by all, also when the hosts are network namespaces of one machine."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch.distributed as dist
from harness import run_ranks
from windows import LONG, all_meet, world

from weft.comm import Window, host_id, hosts_of
from weft.comm.tell import store_of
from weft.errors import PeerTimeout

CLONE_NEWNET = 0x40000000


def move_to_another_network(leader: int) -> bool:
    """Puts this rank into the network namespace that rank `leader` makes; its open connections stay.

    False on all ranks when that is not permitted.
    """
    libc, store, rank = ctypes.CDLL(None, use_errno=True), store_of(world()), dist.get_rank()
    if rank == leader:
        done = libc.unshare(CLONE_NEWNET) == 0
        store.set("network", str(os.getpid()) if done else "0")
    pid = int(store.get("network"))
    if pid and rank > leader:
        with open(f"/proc/{pid}/ns/net") as network:
            assert libc.setns(network.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    dist.barrier()
    return pid != 0


def windows_on_two_hosts() -> tuple[int, ...] | None:
    home = host_id()
    if not move_to_another_network(leader=2):
        return None
    window = Window.create(world(), 4096, counters_per_rank=1, timeout=LONG)
    here = (0, 1) if window.rank < 2 else (2, 3)
    assert window.ranks == here
    assert (host_id() == home) == (window.rank < 2)
    for peer in window.ranks:
        window.peer(peer)[window.rank] = 1 + window.rank
    all_meet(window, 1)
    assert window.local.nonzero().flatten().tolist() == list(here)
    with pytest.raises(ValueError, match=r"a rank on another host is reached through Group\.send"):
        window.peer((window.rank + 2) % 4)
    return hosts_of(world(), timeout=LONG)


def test_ranks_of_two_hosts_share_within_each() -> None:
    results = run_ranks(windows_on_two_hosts, 4)
    if results[0] is None:
        pytest.skip("making a network namespace needs CAP_SYS_ADMIN")
    assert results == [(0, 0, 1, 1)] * 4


def hosts_with_a_missing_rank() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(PeerTimeout) as caught:
        hosts_of(world(), timeout=0.5)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    results = run_ranks(hosts_with_a_missing_rank, 3)
    for text in (results[0], results[2]):
        assert text == "waited 0.5 s for rank 1 at the start of hosts_of"


def window_of_a_subgroup() -> tuple[int, ...]:
    part = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ()
    with Window.create(part, 64, timeout=LONG, counters_per_rank=1) as window:
        assert window.rank == dist.get_rank() - 1
        window.peer(1 - window.rank).fill_(9)
        all_meet(window, 1)
        assert window.local.sum() == 9 * 64
        return window.ranks


def test_ranks_count_within_the_group() -> None:
    assert run_ranks(window_of_a_subgroup, 3) == [(), (0, 1), (0, 1)]
