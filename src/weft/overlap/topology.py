"""Who shares a host with whom, and who speaks for a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The host of each rank, hosts numbered from 0 in the order of their first rank.

    >>> t = Topology((0, 0, 1, 1))
    >>> t.ranks_of(1), t.gateway(3, 0), t.destinations(0)
    ((2, 3), 1, (2, 3, 0, 1))
    """

    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        firsts = list(dict.fromkeys(self.hosts))
        if not self.hosts or firsts != list(range(len(firsts))):
            raise ValueError(
                f"hosts are {self.hosts}, expected one number for each rank, from 0 in the order of first ranks, "
                "such as (0, 0, 1, 1); weft.comm.hosts_of gives them"
            )

    @classmethod
    def apart(cls, size: int) -> Topology:
        """Every rank on a host of its own: how a plan without windows sees its ranks."""
        return cls(tuple(range(size)))

    @property
    def size(self) -> int:
        return len(self.hosts)

    @cached_property
    def count(self) -> int:
        """The number of hosts."""
        return max(self.hosts) + 1

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(r for r, h in enumerate(self.hosts) if h == host) for host in range(self.count))

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """The ranks of a host, in order."""
        return self._ranks[host]

    def local(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the host of `rank`, itself among them."""
        return self._ranks[self.hosts[rank]]

    def gateway(self, rank: int, host: int) -> int:
        """Who on `host` speaks with `rank`: the one in the same place there, so that all take part evenly."""
        there = self._ranks[host]
        return there[self.local(rank).index(rank) % len(there)]

    def other_hosts(self, host: int) -> tuple[int, ...]:
        """The hosts after `host`, and then those before it: everybody starts with a different one."""
        return tuple((host + i) % self.count for i in range(1, self.count))

    def destinations(self, host: int) -> tuple[int, ...]:
        """All ranks in the order in which `host` serves them: other hosts first, its own ranks last."""
        return tuple(rank for other in (*self.other_hosts(host), host) for rank in self._ranks[other])


def nested(hosts: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`ranks` grouped by host, hosts in order: the order in which partial results are added up.

    >>> nested((0, 1, 0, 1), range(4))
    ((0, 2), (1, 3))
    """
    topology = Topology(tuple(hosts))
    groups = (tuple(r for r in topology.ranks_of(h) if r in ranks) for h in range(topology.count))
    return tuple(group for group in groups if group)
