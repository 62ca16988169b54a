"""Which ranks of a group share a machine: what shares a network card and can share memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft.comm.deadline import Deadline
from weft.comm.rendezvous import meeting

_MEMORY = " "  # between what names the card and what names the memory


def host_id() -> str:
    """A name that two processes have in common exactly if they run on one host: share a network card, and memory.

    The kernel's boot id tells machines apart, the network namespace tells the lab's hosts apart on one
    machine. The hostname is not used: containers of one machine have different ones, and cloned images the
    same. Containers may share the card and still not see each other's processes, which is how memory is shared:
    what is apart in that, or runs as another user, counts as another host.

    >>> host_id() == host_id()
    True
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    net, pid, user = map(_namespace, ("net", "pid", "user"))
    return f"{boot}/net:{net}{_MEMORY}pid:{pid}/user:{user}:{os.geteuid()}"


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except FileNotFoundError:  # a kernel without namespaces of this kind
        return 0


def why_apart(ids: Sequence[str]) -> str:
    """Why ranks of one machine count as several hosts; "" where none do.

    >>> why_apart(["a/net:1 pid:2/user:3:0", "a/net:1 pid:9/user:3:0"])
    'ranks 0, 1 share a network card but not memory: other PID namespaces or users'
    """
    cards: dict[str, list[int]] = {}
    for rank, name in enumerate(ids):
        cards.setdefault(name.split(_MEMORY)[0], []).append(rank)
    split = [ranks for ranks in cards.values() if len({ids[rank] for rank in ranks}) > 1]
    if not split:
        return ""
    who = "; ranks ".join(", ".join(map(str, ranks)) for ranks in split)
    return f"ranks {who} share a network card but not memory: other PID namespaces or users"


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
    return number_hosts(host_ids_of(pg, timeout=timeout, store=store))


_MEMORY = " "  # between what names the card and what names the memory


def host_ids_of(pg: ProcessGroup, *, timeout: float, store: Store | None = None) -> list[str]:
    """The `host_id` of each rank of `pg`. Collective, as `hosts_of`."""
    with meeting(pg, "hosts", ("enter",), deadline=Deadline.after(timeout), store=store) as held:
        return held.gather("enter", host_id())
