"""Which process a rank is, said in the group's store, so that others on its machine can see whether it still runs.

A connection that closes does not tell who died: a rank that gives up closes its own as well. The kernel knows.
"""

from __future__ import annotations

import os
from pathlib import Path

_ENDED, _STOPPED = "ZX", "Tt"  # states in /proc/PID/stat: dead and not yet buried, or held by a signal or a debugger


def process_key(rank: int) -> str:
    """Where in its group's store a rank says which process it is."""
    return f"weft/process/{rank}"


def this_process() -> str:
    """The machine and its PID namespace, the process's number there, and when it started: numbers are used again.

    >>> is_gone(this_process())
    False
    """
    pid = os.readlink("/proc/self")
    _, started = _state_of(pid)
    return f"{_machine()} {pid} {started}"


def is_gone(process: str) -> bool:
    """Whether a process that runs on this machine has ended or is stopped. False for one that cannot be seen from here.

    >>> is_gone("another-machine 1 0"), is_gone(f"{this_process()}0")
    (False, True)
    """
    machine, pid, started = process.rsplit(" ", 2)
    if machine != _machine():
        return False
    try:
        state, since = _state_of(pid)
    except OSError:
        return True
    return since != started or state in _ENDED + _STOPPED


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        return f"{boot}/pid:{os.stat('/proc/self/ns/pid').st_ino}"
    except FileNotFoundError:  # a kernel without such namespaces
        return boot


def _state_of(pid: str) -> tuple[str, str]:
    """The state of a process and its start, in clock ticks since the machine's own."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()  # names may have spaces
    return words[0], words[19]
