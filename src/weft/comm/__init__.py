"""How bytes move: messages in a process group, memory shared inside a host, and counters to wait on.

group       messages between ranks, agreement, and what a rank tells all others (tell)
tags        which tags are whose, while several operations are under way
deadline    how long to wait; listen: so that signals are heard meanwhile
window      memory that the ranks of a host share; signal: counters in it
rendezvous  meetings in a group's store, for set-up; hosts: who shares one; clocks
banks, lean collectives inside a host with next to no overhead
priority    the scheduling of gloo's threads
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
