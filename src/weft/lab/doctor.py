"""Whether this machine can make a lab with rate-limited links, and if not, why and what to do about it."""

from __future__ import annotations

import subprocess

from weft.errors import LabUnavailable
from weft.lab import launch
from weft.lab.network import enter, find_tool


def namespaces_available() -> tuple[bool, str]:
    """(True, what works) or (False, what is missing and the remedy).

    It makes a real lab's namespaces and links for one host in a process of its own (without torch, in a
    fraction of a second); the kernel takes them away with that process.
    """
    try:
        tools = [find_tool(name) for name in ("ip", "tc")]
    except LabUnavailable as error:
        return False, str(error)
    probe = launch.python("from weft.lab.doctor import probe; sys.exit(probe())", "weft-lab-probe")
    done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        return False, (done.stdout or done.stderr).strip()
    return True, f"namespaces, links and rate limits work, with {' and '.join(tools)}"


def probe() -> int:
    """Tries it in this process, which must end afterwards: 0, or prints the reason and is 1."""
    try:
        enter(hosts=1, gbps=1.0)
    except LabUnavailable as error:
        print(error)
        return 1
    return 0
