"""What a figure was measured on, how much of it others used meanwhile, and how much memory a call took.

`describe` names no hosts: reports are published. Others are other processes, and the hypervisor.

`/proc/stat` counts what all processes used and what the hypervisor took (*steal*); less what our own
processes used, the rest is foreign. Interrupts are left out: the traffic of our own benchmarks causes most of
them, and nobody is charged. It counts in ticks of 10 ms, so a stretch shorter than about a quarter of a second cannot
be told to a tenth of a core. Our own time is read from the processes' CPU clocks, to the nanosecond.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


def cpu_model(cpuinfo: str) -> str:
    """The model of the first CPU, from the text of `/proc/cpuinfo`; "unknown" where it does not say (as on
    Arm).

    >>> cpu_model("processor : 0\\nmodel name : Example CPU @ 2.0GHz\\n")
    'Example CPU @ 2.0GHz'
    """
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"


def memory_gib(meminfo: str) -> float:
    """The memory of the machine in GiB, from the text of `/proc/meminfo`.

    >>> memory_gib("MemTotal:       16777216 kB\\nMemFree:  1 kB\\n")
    16.0
    """
    return int(meminfo.split("MemTotal:", 1)[1].split()[0]) / (1 << 20)


def describe() -> Mapping[str, object]:
    """CPU, cores, instruction set, memory, kernel and versions, as plain JSON values."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": instruction_set(),
        "memory_gib": round(memory_gib(Path("/proc/meminfo").read_text()), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "weft": metadata.version("weft"),
    }


def instruction_set() -> str | None:
    """The instruction set that the native core runs here; None where the core is not built."""
    try:
        from weft import _core
    except ImportError:
        return None
    return _core.kernels().name


SHORTEST_SECONDS = 0.25
"""The shortest stretch for which `foreign_cores` means something."""


@dataclass(frozen=True)
class Sample:
    """Readings at one moment: the wall clock, and CPU seconds used so far by everybody and by us."""

    wall: float
    everybody: float
    own: float


@dataclass(frozen=True)
class Process:
    """One process: its parent, its own CPU seconds, and those of its children that have ended."""

    parent: int
    seconds: float
    ended_children_seconds: float


def foreign_cores(before: Sample, after: Sample) -> float:
    """Cores that others used between two samples, on average; never negative.

    >>> foreign_cores(Sample(0.0, 100.0, 10.0), Sample(2.0, 103.5, 13.0))
    0.25
    """
    used = (after.everybody - before.everybody) - (after.own - before.own)
    return max(0.0, used / (after.wall - before.wall))


def everybody_seconds(stat: str, *, ticks_per_second: int) -> float:
    """User, nice, system and steal time of all CPUs, from the text of `/proc/stat`.

    >>> everybody_seconds("cpu  100 10 50 9000 7 3 4 40 0 0", ticks_per_second=100)
    2.0
    """
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + steal) / ticks_per_second


def parse_process(stat: str, *, ticks_per_second: int) -> Process:
    """A process from the text of `/proc/PID/stat`. Its name, in brackets, may hold blanks and brackets.

    >>> parse_process("7 (a) b) R 1 7 7 0 -1 0 0 0 0 0 200 100 30 20 20 0", ticks_per_second=100)
    Process(parent=1, seconds=3.0, ended_children_seconds=0.5)
    """
    fields = stat[stat.rindex(")") + 1 :].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return Process(
        parent=int(fields[1]),
        seconds=(user + system) / ticks_per_second,
        ended_children_seconds=(children_user + children_system) / ticks_per_second,
    )


def tree_seconds(processes: Mapping[int, Process], root: int) -> float:
    """CPU seconds of a process and of all that descend from it, living and ended.

    >>> tree_seconds({1: Process(0, 9.0, 9.0), 7: Process(1, 2.0, 0.5), 8: Process(7, 1.0, 0.0)}, root=7)
    3.5
    """
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    seconds, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        seconds += processes[pid].seconds + processes[pid].ended_children_seconds
        waiting += children.get(pid, [])
    return seconds


class NoiseMeter:
    """Reads samples on Linux. `root` is the process whose descendants are our own, as a rule this one.

    A rank of a lab passes the process that started the ranks, or else its fellows count as foreign.
    """

    def __init__(self, *, root: int | None = None) -> None:
        self._root = os.getpid() if root is None else root
        self._ticks = os.sysconf("SC_CLK_TCK")

    def sample(self) -> Sample:
        """The readings of now."""
        everybody = everybody_seconds(Path("/proc/stat").read_text(), ticks_per_second=self._ticks)
        return Sample(time.perf_counter(), everybody, tree_seconds(self._processes(), self._root))

    def _processes(self) -> dict[int, Process]:
        processes = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                process = parse_process(Path(f"/proc/{pid}/stat").read_text(), ticks_per_second=self._ticks)
                processes[pid] = Process(process.parent, _cpu_clock(pid), process.ended_children_seconds)
            except OSError:
                continue  # it has ended since the listing; its parent has its time now
        return processes


def _cpu_clock(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond; see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grew at its peak during a run."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _memory("VmRSS")
    run()
    return max(0, _memory("VmHWM") - before)


def _memory(key: str) -> int:
    """A figure of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(f"{key}:")).split()[1])
