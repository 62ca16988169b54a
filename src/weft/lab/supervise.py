"""Runs one job: forks its ranks, watches them, and sees to it that none is left when it returns."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from weft.lab import linux, network
from weft.lab.outcome import Ending, How
from weft.lab.rank import STACKS_SIGNAL, Seat, rank_main
from weft.lab.spec import Job, Spec

GRACE = 2.0
"""Seconds that ranks have after another's failure to raise by themselves, and after the end to exit."""


class CallerGone(Exception):
    """The process that asked for the run has closed its end: nobody waits for the answer."""


@dataclass
class _Process:
    """A forked rank. `ending` is None while it runs."""

    rank: int
    pid: int
    pidfd: int
    reports: Connection
    stacks: int
    ending: Ending | None = None
    said: Ending | None = field(default=None, repr=False)

    def close(self) -> None:
        for fd in (self.pidfd, self.stacks):
            os.close(fd)
        self.reports.close()


def run_job(spec: Spec, job: Job, namespaces: Sequence[int], control: Connection) -> list[Ending]:
    """The endings of all ranks, in the order of ranks. Raises CallerGone when `control` closes meanwhile."""
    start = time.monotonic()
    memories = _make_memories(spec)
    processes: list[_Process] = []
    try:
        with _listen(namespaces) as store:
            for rank in range(spec.world):
                processes.append(_fork(spec, job, rank, namespaces, memories, store, control, processes))
        _watch(processes, control, start + job.run.timeout)
        return [process.ending for process in processes if process.ending is not None]
    finally:
        linux.kill_children()
        for process in processes:
            process.close()
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)


def _make_memories(spec: Spec) -> list[str]:
    """A directory for each host in the lab's own /dev/shm; on plain loopback there is no such thing."""
    if spec.gbps is None:
        return []
    memories = [f"/dev/shm/host{host}" for host in range(spec.hosts)]
    for memory in memories:
        os.mkdir(memory)
        os.chmod(memory, 0o1777)
    return memories
