"""What a lab promises to the function that runs in it, and to the caller."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.errors import PeerTimeout, RankFailed
from weft.lab import Cluster, Rank
from weft.lab.linux import card


@pytest.fixture(scope="module")
def second(namespaces: None) -> Iterator[Cluster]:
    with Cluster(hosts=2, devices=1, gbps=1.0, threads=2) as lab:
        yield lab


def who_am_i(rank: Rank, word: str) -> tuple[object, ...]:
    total = torch.tensor([rank.rank])
    dist.all_reduce(total, group=rank.group)
    shape = rank.mesh.shape, rank.mesh.mesh_dim_names, tuple(rank.mesh.get_coordinate() or ())
    return rank.rank, rank.world, rank.host, rank.device, rank.hosts, total.item(), shape, word


def test_results_come_back_by_rank(cluster: Cluster) -> None:
    shape = (2, 2), ("host", "device")
    assert cluster.run(who_am_i, "hello") == [
        (0, 4, 0, 0, (0, 0, 1, 1), 6, (*shape, (0, 0)), "hello"),
        (1, 4, 0, 1, (0, 0, 1, 1), 6, (*shape, (0, 1)), "hello"),
        (2, 4, 1, 0, (0, 0, 1, 1), 6, (*shape, (1, 0)), "hello"),
        (3, 4, 1, 1, (0, 0, 1, 1), 6, (*shape, (1, 1)), "hello"),
    ]


def doubled(rank: Rank, x: torch.Tensor) -> torch.Tensor:
    return x * 2 + rank.rank


def test_tensors_larger_than_any_pipe_go_in_and_out(cluster: Cluster) -> None:
    x = torch.arange(1 << 20)
    results = cluster.run(doubled, x)
    assert all(torch.equal(result, x * 2 + rank) for rank, result in enumerate(results))


def address_of_card(rank: Rank) -> tuple[str, str, list[str]]:
    interfaces = [name for _, name in socket.if_nameindex()]
    return os.readlink("/proc/self/ns/net"), socket.gethostbyname(f"host{rank.host}"), interfaces


def test_each_host_is_a_namespace_of_its_own(cluster: Cluster) -> None:
    namespaces, addresses, interfaces = zip(*cluster.run(address_of_card), strict=True)
    outside = os.readlink("/proc/self/ns/net")
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert outside not in namespaces
    assert addresses == ("10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2")
    assert interfaces == (["lo", "eth0"],) * 4


def leave_memory(rank: Rank) -> list[str]:
    if rank.device == 0:
        memory = shared_memory.SharedMemory(f"of-host-{rank.host}", create=True, size=4096)
        memory.close()
    dist.barrier(rank.group)
    return sorted(os.listdir("/dev/shm"))


def see_memory(rank: Rank) -> list[str]:
    return os.listdir("/dev/shm")


def test_shared_memory_is_the_hosts_own_and_ends_with_the_run(cluster: Cluster) -> None:
    outside = sorted(os.listdir("/dev/shm"))
    assert cluster.run(leave_memory) == [["of-host-0"], ["of-host-0"], ["of-host-1"], ["of-host-1"]]
    assert sorted(os.listdir("/dev/shm")) == outside
    assert cluster.run(see_memory) == [[]] * 4


def set_threads(rank: Rank) -> tuple[int, float]:
    # A thread pool that did not survive the fork would hang here.
    x = torch.ones(512, 512)
    return torch.get_num_threads(), (x @ x)[0, 0].item()


def test_threads_work_in_the_ranks(second: Cluster) -> None:
    assert second.run(set_threads) == [(2, 512.0)] * 2


def raise_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(0.1)
        raise ValueError("the real cause")
    dist.barrier(rank.group)


def test_the_failure_is_the_first_ranks_own_traceback(cluster: Cluster) -> None:
    with pytest.raises(RankFailed) as info:
        cluster.run(raise_on_rank_1)
    text = str(info.value)
    assert text.startswith("rank 1 (host 0, device 1) of 4 failed first in `raise_on_rank_1`: ValueError: the")
    assert 'raise ValueError("the real cause")' in text
    assert "3 of the other ranks ended after it" in text
    assert cluster.run(doubled, 1) == [2, 3, 4, 5]  # the lab lives on


def end_rank_3(rank: Rank, how: str) -> None:
    dist.barrier(rank.group)
    if rank.rank == 3 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 3 and how == "exit":
        os._exit(7)
    if rank.rank == 3 and how == "sys.exit":
        sys.exit("giving up")
    if rank.rank == 3 and how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier(rank.group)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "killed by SIGKILL"),
        ("exit", "exited with status 7"),
        ("sys.exit", "SystemExit: giving up"),
        ("segfault", "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_dies_is_the_cause_and_not_its_peers(cluster: Cluster, how: str, message: str) -> None:
    with pytest.raises(RankFailed) as info:
        cluster.run(end_rank_3, how)
    assert str(info.value).startswith(f"rank 3 (host 1, device 1) of 4 failed first in `end_rank_3`: {message}")
    assert ("in end_rank_3" in str(info.value)) == (how in ("segfault", "sys.exit"))


def die_at_exit(rank: Rank) -> None:
    if rank.rank == 2:
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)


def test_a_death_after_the_return_is_not_overlooked(cluster: Cluster) -> None:
    with pytest.raises(RankFailed, match=r"rank 2 .* killed by SIGKILL after it had returned"):
        cluster.run(die_at_exit)


def wait_for_nobody(rank: Rank) -> None:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank.rank == 2:
        time.sleep(1000)


def test_ranks_that_hang_are_named_with_their_stacks(cluster: Cluster) -> None:
    with pytest.raises(PeerTimeout) as info:
        cluster.run(wait_for_nobody, timeout=4.0)
    text = str(info.value)
    assert text.startswith("waited 4 s for 2 of 4 ranks of `wait_for_nobody` that were still running, ranks 1, 2;")
    assert "rank 1 (host 0, device 1):\n  no stack" in text  # it cannot even answer
    assert "rank 2 (host 1, device 0):" in text
    assert "in wait_for_nobody" in text


def ignore_the_failure(rank: Rank) -> None:
    dist.barrier(rank.group)
    if rank.rank == 0:
        raise KeyError("first")
    time.sleep(1000)


def test_ranks_that_ignore_a_failure_are_stopped_after_a_grace(cluster: Cluster) -> None:
    with pytest.raises(RankFailed, match=r"KeyError: 'first'(?s:.*)rank 3 .* stopped: it was still running"):
        cluster.run(ignore_the_failure, timeout=100.0)


def leave_a_daemon(rank: Rank, folder: str) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, str(rank.rank)).write_text(str(child.pid))


def test_what_a_rank_started_ends_with_the_run(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(leave_a_daemon, str(tmp_path))
    pids = [file.read_text() for file in tmp_path.iterdir()]
    assert len(pids) == 4
    assert not any(Path("/proc", pid).exists() for pid in pids)


def unpicklable(rank: Rank) -> object:
    return lambda: None


def test_a_result_that_does_not_pickle_is_a_failure_of_its_rank(cluster: Cluster) -> None:
    with pytest.raises(RankFailed, match=r"failed first in `unpicklable`: (?s:.*)[Pp]ickl"):
        cluster.run(unpicklable)


def send_across(rank: Rank, nbytes: int, senders: tuple[int, ...]) -> tuple[float, float]:
    """Each sender sends to the same device of the other host; when this rank began, and when it was done."""
    data = torch.zeros(nbytes, dtype=torch.uint8)
    peer = (rank.rank + 2) % 4
    start = time.monotonic()
    work = []
    if rank.rank in senders:
        work.append(dist.isend(data, peer, group=rank.group))
    if peer in senders:
        work.append(dist.irecv(torch.empty_like(data), peer, group=rank.group))
    for each in work:
        assert each is not None
        each.wait()
    return start, time.monotonic()


@pytest.mark.parametrize("senders", [(0,), (0, 2), (0, 1)], ids=["one way", "both ways", "two share a card"])
def test_no_link_is_faster_than_its_rate(cluster: Cluster, senders: tuple[int, ...]) -> None:
    nbytes = 2_000_000
    on_one_card = 2 if senders == (0, 1) else 1
    starts, ends = zip(*cluster.run(send_across, nbytes, senders), strict=True)
    seconds = max(ends) - min(starts[rank] for rank in senders)
    # What a token bucket can let through at most: a full bucket, and then the rate.
    assert seconds >= (nbytes * on_one_card - card(0.1).burst) * 8 / 0.1e9


def send_inside(rank: Rank, nbytes: int) -> float:
    data = torch.zeros(nbytes, dtype=torch.uint8)
    dist.barrier(rank.group)
    start = time.monotonic()
    if rank.device == 0:
        dist.send(data, rank.rank + 1, group=rank.group)
    else:
        dist.recv(data, rank.rank - 1, group=rank.group)
    return time.monotonic() - start


def test_inside_a_host_there_is_no_limit(cluster: Cluster) -> None:
    at_the_links_rate = 100_000_000 * 8 / 0.1e9
    assert max(cluster.run(send_inside, 100_000_000)) < at_the_links_rate / 2


def test_what_ranks_print_comes_out(namespaces: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from weft.lab import Cluster\n"
        "def speak(rank):\n"
        "    print(f'rank {rank.rank} speaks')\n"
        "    return rank.rank\n"
        "if __name__ == '__main__':\n"
        "    with Cluster(hosts=2, devices=1, gbps=1.0) as cluster:\n"
        "        print(cluster.run(speak))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["[0, 1]", "rank 0 speaks", "rank 1 speaks"]


def test_a_script_without_a_main_guard_gets_the_remedy(namespaces: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from weft.lab import Cluster\n"
        "def nothing(rank):\n"
        "    pass\n"
        "with Cluster(hosts=1, devices=1, gbps=None) as cluster:\n"
        "    cluster.run(nothing)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert 'Put the code that starts it under `if __name__ == "__main__":`' in done.stderr


def test_two_labs_at_once_do_not_meet(cluster: Cluster, second: Cluster) -> None:
    ours = {namespace for namespace, _, _ in cluster.run(address_of_card)}
    theirs = {namespace for namespace, _, _ in second.run(address_of_card)}
    assert len(ours) == len(theirs) == 2
    assert not ours & theirs


def test_sixteen_ranks(namespaces: None) -> None:
    with Cluster(hosts=8, devices=2, gbps=1.0) as large:
        assert [result[5] for result in large.run(who_am_i, "", timeout=60.0)] == [120] * 16
