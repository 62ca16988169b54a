"""How bytes move: messages in a process group, memory shared inside a host, and counters to wait on.

group             messages between ranks, agreement; the priority of gloo's threads
tags              which tags are whose, while several operations are under way: leases
tell              how a rank tells all others something small; meetings in a group's store
deadline          how long to wait, and so that signals are heard meanwhile
window            which ranks share a host, and memory that they share
signal            counters that one thread or process raises and another waits on
processes         which process a rank is, and whether it still runs
survivors         a new group of those that are left after a failure
host_collectives  collectives inside a host with next to no overhead
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.comm.group import Group, Transfer
    from weft.comm.signal import Counters
    from weft.comm.window import Window, host_id, hosts_of
    from weft.errors import PeerLost

__all__ = ["Counters", "Group", "PeerLost", "Transfer", "Window", "host_id", "hosts_of"]

_HOMES = {
    "Counters": "weft.comm.signal",
    "Group": "weft.comm.group",
    "PeerLost": "weft.errors",
    "Transfer": "weft.comm.group",
    "Window": "weft.comm.window",
    "host_id": "weft.comm.window",
    "hosts_of": "weft.comm.window",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"weft.comm has no {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
