"""Which ranks of a group share a machine: what shares a network card and can share memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft.comm.deadline import Deadline
from weft.comm.rendezvous import meeting


def host_id() -> str:
    """A name that two processes have in common exactly if they run on one host.

    The kernel's boot id tells machines apart, the network namespace tells the lab's hosts apart on one
    machine. The hostname is not used: containers of one machine have different ones, and cloned images the
    same.

    >>> host_id() == host_id()
    True
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/net:{os.stat('/proc/self/ns/net').st_ino}"


def number_hosts(ids: Sequence[str]) -> tuple[int, ...]:
    """The host index of each rank from its host id; hosts are numbered in the order of their first rank.

    >>> number_hosts(["b", "b", "a", "b"])
    (0, 0, 1, 0)
    """
    index = {name: i for i, name in enumerate(dict.fromkeys(ids))}
    return tuple(index[name] for name in ids)


def hosts_of(pg: ProcessGroup, *, timeout: float, store: Store | None = None) -> tuple[int, ...]:
    """The host index of each rank of `pg`, the same on every rank. Collective over `pg`, through its store.

    `store` is for groups that torch.distributed does not know; it must be private to this group.
    """
    with meeting(pg, "hosts", ("enter",), deadline=Deadline.after(timeout), store=store) as held:
        return number_hosts(held.gather("enter", host_id()))
