"""Whoever is killed with SIGKILL in mid-run: no process, namespace, interface, mount or shared memory remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """\
import subprocess, sys, time
from multiprocessing import shared_memory
from pathlib import Path
from weft.lab import Cluster

def hang(rank, folder):
    memory = shared_memory.SharedMemory(f"weft-kill-{rank.rank}", create=True, size=1 << 20)
    if rank.rank == 0:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, str(rank.rank)).touch()
    time.sleep(1000)

if __name__ == "__main__":
    with Cluster(hosts=2, devices=2, gbps=1.0) as cluster:
        cluster.run(hang, sys.argv[1], timeout=1000.0)
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


def traces() -> tuple[str, list[str], str]:
    """What could be left on the machine itself: links, shared memory, mounts."""
    links = Path("/proc/net/dev").read_text().splitlines()[2:]
    names = " ".join(sorted(line.split(":")[0].strip() for line in links))
    return names, sorted(os.listdir("/dev/shm")), Path("/proc/self/mounts").read_text()


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def hanging_lab(namespaces: None, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script whose four ranks all hang in their function; rank 0 has started a daemon of its own."""
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


@pytest.mark.parametrize("victim", ["caller", "guard", "zygote", "rank"])
def test_nothing_is_left(victim: str, hanging_lab: subprocess.Popen[str]) -> None:
    (guard,) = children(hanging_lab.pid)
    (zygote,) = children(guard)
    ranks = children(zygote)
    everyone = [identify(pid) for pid in descendants(hanging_lab.pid)]
    # The guard is what catches a daemon; nobody but its own murderer has an interest in killing it.
    (daemon,) = [pid for pid in descendants(zygote) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    expected = [process for process in everyone if victim != "guard" or process[0] != daemon]
    assert len(ranks) == 4
    assert len(everyone) >= 7

    pid = {"caller": hanging_lab.pid, "guard": guard, "zygote": zygote, "rank": ranks[2]}[victim]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(lives(process) for process in expected), "the end of the lab", 20.0)

    if victim == "guard":
        os.kill(daemon, signal.SIGKILL)
    if victim != "caller":
        _, stderr = hanging_lab.communicate(timeout=20.0)
        assert ("rank 2 (host 1, device 0) of 4 failed first" in stderr) == (victim == "rank")
        assert ("its own process died" in stderr) == (victim in ("guard", "zygote"))


def test_the_machine_is_as_before(request: pytest.FixtureRequest) -> None:
    before = traces()
    caller: subprocess.Popen[str] = request.getfixturevalue("hanging_lab")
    processes = [identify(pid) for pid in descendants(caller.pid)]
    inside = {os.readlink(f"/proc/{pid}/ns/net") for pid, _ in processes}
    assert len(inside) == 4  # the machine's own (the guard is in it), the switch's and two hosts'
    assert traces() == before  # nothing shows outside even while the lab is up

    caller.kill()
    wait_until(lambda: not any(lives(process) for process in processes), "the end of the lab", 20.0)
    assert traces() == before
    inside.discard(os.readlink("/proc/self/ns/net"))
    assert not inside & namespaces_in_use()


def namespaces_in_use() -> set[str]:
    """The network namespaces of all processes: with no name and no mount, nothing else keeps one."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            found.add(os.readlink(entry / "ns" / "net"))
        except OSError:
            continue  # not a process, or gone, or not ours to see
    return found
