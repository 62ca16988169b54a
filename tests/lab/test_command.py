"""Commands on the hosts of a lab: where they run, how they end, what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.errors import PeerTimeout, RankFailed
from weft.lab import Cluster, Rank

SHOW = (
    "hostname; getent ahostsv4 $(hostname) | head -n 1; echo $WEFT_LAB_HOST $OMP_NUM_THREADS $EXTRA; pwd; "
    "readlink /proc/self/ns/net"
)


def said(cluster: Cluster, host: int, line: str, folder: Path, **env: str) -> list[str]:
    with (folder / f"said{host}").open("w+") as file:
        assert cluster.command(host, ["sh", "-c", line], stdout=file, env=env, cwd=folder).wait(timeout=30.0) == 0
        file.seek(0)
        return file.read().splitlines()


def test_a_command_is_on_its_host(cluster: Cluster, tmp_path: Path) -> None:
    found = [said(cluster, host, SHOW, tmp_path, EXTRA="a b") for host in range(2)]
    for host, (name, address, variables, folder, _) in enumerate(found):
        assert name == f"host{host}"
        assert address.split()[0] == cluster.address(host) == f"10.77.0.{host + 1}"
        assert variables == f"{host} 1 a b"
        assert folder == str(tmp_path)
    assert found[0][-1] != found[1][-1] != os.readlink("/proc/self/ns/net")
    assert os.uname().nodename != "host1"


def network(rank: Rank) -> str:
    return os.readlink("/proc/self/ns/net")


def test_it_runs_next_to_the_ranks_and_shares_their_card(cluster: Cluster, tmp_path: Path) -> None:
    waits = cluster.command(1, ["sleep", "1000"])
    ranks = cluster.run(network)  # and its end leaves commands alone
    assert waits.poll() is None
    assert said(cluster, 1, SHOW, tmp_path)[-1] == ranks[2] == ranks[3] != ranks[0]
    waits.send_signal(signal.SIGTERM)
    assert waits.wait(timeout=30.0) == waits.poll() == -signal.SIGTERM
    waits.kill()  # harmless


def test_a_host_keeps_its_memory_and_nobody_elses(cluster: Cluster, tmp_path: Path) -> None:
    said(cluster, 0, "echo kept > /dev/shm/mark", tmp_path)
    assert said(cluster, 0, "cat /dev/shm/mark", tmp_path) == ["kept"]
    assert said(cluster, 1, "ls /dev/shm", tmp_path) == []
    assert not Path("/dev/shm/mark").exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("way", ["kill", "end"])
def test_it_ends_with_all_that_it_started(cluster: Cluster, tmp_path: Path, way: str) -> None:
    line = "setsid sleep 1003 & echo $! > daemon.part; mv daemon.part daemon"
    command = cluster.command(0, ["sh", "-c", f"{line}; {'sleep 1004' if way == 'kill' else 'exit 7'}"], cwd=tmp_path)
    while not (tmp_path / "daemon").exists():
        time.sleep(0.01)
    if way == "kill":
        assert alive(int((tmp_path / "daemon").read_text()))
        command.kill()
    assert command.wait(timeout=30.0) == (-signal.SIGKILL if way == "kill" else 7)
    assert not alive(int((tmp_path / "daemon").read_text()))
    assert not alive(command.pid)


def test_what_cannot_be_started_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"host 1 could not start 'nonesuch' in .*; expected a program on PATH"):
        cluster.command(1, ["nonesuch"])
    with pytest.raises(ValueError, match="expected one of 0 to 1"):
        cluster.command(2, ["true"])
    with pytest.raises(ValueError, match="expected the program and its arguments"):
        cluster.command(0, "true")
    with pytest.raises(ValueError, match="a directory that is there"):
        cluster.command(0, ["true"], cwd=tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match="is not open"):
        Cluster().command(0, ["true"])
    waits = cluster.command(0, ["sleep", "1000"])
    with pytest.raises(PeerTimeout, match=r"`sleep 1000` on host 0 to end"):
        waits.wait(timeout=0.01)
    waits.kill()


ALL_REDUCE = """\
import os, torch, torch.distributed as dist
from weft.lab.backend import register
register(os.open(os.environ["WEFT_LAB_WIRE"], os.O_RDWR), int(os.environ["WEFT_LAB_HOST"]))
dist.init_process_group("dma")
rank = dist.get_rank()
x = torch.arange(4.0) + 10 * rank
dist.all_reduce(x)
assert x.tolist() == [10.0, 12.0, 14.0, 16.0], x
assert dist.group.WORLD.carried()[0] > 0
dist.barrier()
"""


def test_processes_of_a_command_use_dma_cards_and_end_with_the_lab(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(ALL_REDUCE)
    with Cluster(hosts=2, devices=1, gbps=1.0, cards="dma") as cluster:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": cluster.address(0), "MASTER_PORT": "29512"}
        commands = [
            cluster.command(host, ["python", "sums.py"], env={**variables, "RANK": str(host)}, cwd=tmp_path)
            for host in range(2)
        ]
        assert [command.wait(timeout=60.0) for command in commands] == [0, 0]
        left = cluster.command(1, ["sleep", "1000"])
        assert alive(left.pid)
    assert not alive(left.pid)
    with pytest.raises(RankFailed, match="ended with its lab"):
        left.wait(timeout=1.0)


def test_on_plain_loopback_too(tmp_path: Path) -> None:
    with Cluster(hosts=2, devices=1, gbps=None) as cluster:
        assert said(cluster, 1, "echo $WEFT_LAB_HOST $GLOO_SOCKET_IFNAME", tmp_path) == ["1 lo"]
        assert cluster.address(1) == "127.0.0.1"


def test_lab_run_fills_in_names_and_shows_whose_line_it_is(namespaces: None, tmp_path: Path) -> None:
    line = "echo {host} of {hosts} at {rank0_address} {}; exit {host}"
    command = [sys.executable, "-m", "weft", "lab", "run", "--hosts", "2", "--", "sh", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100.0)
    assert sorted(done.stdout.splitlines()) == ["host0 | 0 of 2 at 10.77.0.1 {}", "host1 | 1 of 2 at 10.77.0.1 {}"]
    assert "host1: the command ended with 1" in done.stderr
    assert done.returncode == 1
