"""How bytes move: messages in a process group, memory shared inside a host, and counters to wait on."""

from weft.comm.group import Group, Transfer
from weft.comm.hosts import host_id, hosts_of
from weft.comm.signal import Counters
from weft.comm.window import Window
from weft.errors import PeerLost

__all__ = ["Counters", "Group", "PeerLost", "Transfer", "Window", "host_id", "hosts_of"]
