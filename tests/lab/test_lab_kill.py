"""Whoever is killed with SIGKILL in mid-run: no process, namespace, interface, mount or shared memory remains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = """\
import subprocess, sys
from multiprocessing import shared_memory
from pathlib import Path
from weft.lab import Cluster

def work(rank, folder):
    import torch
    import torch.distributed as dist
    memory = shared_memory.SharedMemory(f"weft-kill-{rank.rank}", create=True, size=1 << 20)
    if rank.rank == 0:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, str(rank.rank)).touch()
    while True:
        dist.all_reduce(torch.zeros(1 << 20), group=rank.group)

if __name__ == "__main__":
    with Cluster(hosts=2, devices=2, gbps=1.0) as cluster:
        cluster.command(1, ["sh", "-c", "exec sleep 1001 & exec sleep 1002"])
        cluster.run(work, sys.argv[1], timeout=1000.0)
"""

Process = tuple[int, str]  # pid and start time: a pid alone may be somebody else's by now


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one, the state, on; none when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def identify(pid: int) -> Process:
    return pid, stat(pid)[19]


def lives(process: Process) -> bool:
    fields = stat(process[0])
    return bool(fields) and fields[19] == process[1] and fields[0] not in "ZX"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def traces() -> tuple[list[str], list[str], str]:
    """What could be left on the machine itself: links, shared memory, mounts (a named namespace is one)."""
    links = sorted(name for _, name in socket.if_nameindex())
    memory = sorted(name for name in os.listdir("/dev/shm") if name.startswith("weft-kill"))
    return links, memory, Path("/proc/self/mounts").read_text()


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def busy_lab(namespaces: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script whose four ranks all send data without end; rank 0 has started a daemon of its own."""
    script, folder = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(SCRIPT)
    folder.mkdir()
    caller = subprocess.Popen([sys.executable, script, folder], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 4 or caller.poll() is not None, "the run", 100.0)
        assert caller.poll() is None
        yield caller
    finally:
        caller.kill()
        caller.communicate()


# Ties a wire to the namespaces of the given processes, and says which wires are left: the kernel takes away
# one whose other end has gone with its namespace.
WITNESS = """\
import socket, subprocess, sys
from weft.lab import linux
linux.isolate()
for line in sys.stdin:
    for pid in line.split():
        wire = f"link add wire{pid} type veth peer name witness netns {pid}"
        subprocess.run([linux.find_tool("ip"), *wire.split()], check=True)
    print(*sorted(name for _, name in socket.if_nameindex()), flush=True)
"""


@pytest.fixture
def witness(namespaces: None) -> Iterator[subprocess.Popen[str] | None]:
    """The process that runs WITNESS; None without root, which a namespace of another user asks for."""
    if os.geteuid() != 0:
        yield None
        return
    command = [sys.executable, "-c", WITNESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def ask(witness: subprocess.Popen[str], question: str) -> list[str]:
    assert witness.stdin is not None
    assert witness.stdout is not None
    witness.stdin.write(f"{question}\n")
    witness.stdin.flush()
    return witness.stdout.readline().split()


@pytest.mark.parametrize("victim", ["caller", "guard", "zygote", "rank"])
def test_nothing_is_left(victim: str, witness: subprocess.Popen[str] | None, request: pytest.FixtureRequest) -> None:
    before = traces()
    lab: subprocess.Popen[str] = request.getfixturevalue("busy_lab")
    assert traces() == before  # nothing shows outside even while the lab is up
    (guard,) = children(lab.pid)
    (zygote,) = children(guard)
    commander, *ranks = children(zygote)
    assert len(ranks) == 4
    assert len(descendants(commander)) == 3  # a supervisor, its command, and what that has started
    everyone = [identify(pid) for pid in descendants(lab.pid)]
    if witness is not None:
        assert len(ask(witness, f"{zygote} {ranks[0]} {ranks[3]}")) == 4  # lo, and three wires
    # The guard is what catches a daemon; nobody but its own murderer has an interest in killing it.
    daemons = [pid for pid in descendants(zygote) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    assert len(daemons) == 3

    os.kill({"caller": lab.pid, "guard": guard, "zygote": zygote, "rank": ranks[2]}[victim], signal.SIGKILL)
    if victim == "guard":
        for daemon in daemons:
            with suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not any(lives(process) for process in everyone), "the end of the lab", 20.0)
    assert traces() == before
    if witness is not None:
        wait_until(lambda: ask(witness, "") == ["lo"], "the end of the namespaces", 20.0)
    _, stderr = lab.communicate(timeout=20.0)
    assert ("rank 2 (host 1, device 0) of 4 failed first" in stderr) == (victim == "rank")
    assert ("its own process died" in stderr) == (victim in ("guard", "zygote"))
