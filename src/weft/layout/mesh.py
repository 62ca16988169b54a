"""`Mesh`: ranks in an array, and the host of each. `DeclaredCluster`: the rates of the hosts' network cards.

Both print, and parse back; runs of whole numbers are written short (`format_ints`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """Ranks in an array, with the host of each and a name for each axis.

    ranks, hosts: one for each place of the array, row by row

    >>> Mesh.of([[4, 5], [6, 7]], hosts=[[0, 0], [1, 1]], axes=("dp", "tp"))
    Mesh('2x2 ranks 4-7 hosts 0*2,1*2 axes dp,tp')
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    hosts: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if len(self.ranks) != size or len(self.hosts) != size or len(self.axes) != len(self.shape):
            raise ValueError(
                f"a mesh of shape {self.shape} has {len(self.ranks)} ranks, {len(self.hosts)} hosts and "
                f"{len(self.axes)} axis names, expected {size}, {size} and {len(self.shape)}"
            )
        if len(set(self.ranks)) != size or min(self.ranks, default=0) < 0 or size == 0:
            raise ValueError(f"ranks of the mesh are {self.ranks}, expected one or more, each 0 or more, each once")

    @classmethod
    def of(cls, ranks: Any, *, hosts: Any, axes: Sequence[str] = ()) -> Mesh:
        """A mesh from nested lists or arrays of equal shape; axes are called a0, a1, ... unless named."""
        array, places = np.asarray(ranks), np.asarray(hosts)
        if array.shape != places.shape:
            raise ValueError(
                f"ranks have shape {array.shape} and hosts {places.shape}, expected equal shapes; "
                "give the host of each rank in the same nesting"
            )
        names = tuple(axes) or tuple(f"a{i}" for i in range(array.ndim))
        return cls(_flat(array), tuple(array.shape), _flat(places), names)

    @classmethod
    def grid(cls, hosts: int, devices: int, *, first_rank: int = 0, first_host: int = 0) -> Mesh:
        """`hosts` x `devices` ranks in a row; axis 0 counts the hosts.

        >>> Mesh.grid(2, 2, first_rank=8, first_host=3)
        Mesh('2x2 ranks 8-11 hosts 3*2,4*2 axes host,device')
        """
        ranks = np.arange(hosts * devices).reshape(hosts, devices)
        return cls.of(ranks + first_rank, hosts=ranks // devices + first_host, axes=("host", "device"))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def array(self) -> Ints:
        """The ranks as an int64 array of the mesh's shape."""
        return np.array(self.ranks, dtype=np.int64).reshape(self.shape)

    def host_of(self, rank: int) -> int:
        """The host of a rank of this mesh."""
        return self.hosts[self.ranks.index(rank)]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{shape} ranks {format_ints(self.ranks)} hosts {format_ints(self.hosts)} axes {','.join(self.axes)}"

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh that prints as `text`."""
        found = re.fullmatch(r"(\S+) ranks (\S+) hosts (\S+) axes (\S*)", text)
        if not found:
            raise ValueError(f"got the mesh {text!r}, expected one such as '2x2 ranks 0-3 hosts 0*2,1*2 axes a,b'")
        shape, ranks, hosts, axes = found.groups()
        sizes = () if shape == "scalar" else tuple(int(size) for size in shape.split("x"))
        return cls(parse_ints(ranks), sizes, parse_ints(hosts), tuple(axes.split(",")) if axes else ())


def _flat(array: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(x) for x in array.reshape(-1))


def check_ranks(ranks: Iterable[int], real: Mapping[int, int]) -> None:
    """All ranks of meshes must be in the process group, `real`: the host of each of its ranks."""
    missing = [rank for rank in ranks if rank not in real]
    if missing:
        raise ValueError(
            f"the meshes have the ranks {missing}, which are not in the process group of ranks {sorted(real)}; "
            "expected a group with all of them; pass group="
        )


def check_hosts(meshes: Iterable[Mesh], real: Mapping[int, int]) -> None:
    """Ranks that meshes put on one host must share one: they will share memory. `real` is as in `check_ranks`.

    >>> check_hosts([Mesh.of([0, 1], hosts=[5, 5])], {0: 0, 1: 0})
    """
    first_on: dict[int, int] = {}
    for mesh in meshes:
        check_ranks(mesh.ranks, real)
        for rank, host in zip(mesh.ranks, mesh.hosts, strict=True):
            first = first_on.setdefault(host, rank)
            if real[first] != real[rank]:
                raise ValueError(
                    f"meshes have ranks {first} and {rank} on host {host}, but they run on different hosts; give each "
                    "rank the host that it runs on (weft.comm.Group.hosts), or a DeviceMesh, and hosts are found"
                )


@dataclass(frozen=True)
class DeclaredCluster:
    """Hosts, each behind one full-duplex network card that its devices share.

    gbps:    payload rate of each host's card in Gbit/s, the same in and out at once
    latency: seconds from the start of a message to its first byte on the other side

    >>> DeclaredCluster.uniform(4, gbps=10.0).rate(0)
    1250000000.0
    """

    gbps: tuple[float, ...]
    latency: float = 100e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "gbps", tuple(float(rate) for rate in self.gbps))
        if not self.gbps or not all(math.isfinite(rate) and rate > 0 for rate in self.gbps):
            raise ValueError(f"gbps is {self.gbps}, expected one finite rate above 0 for each host")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency is {self.latency}, expected seconds, finite and 0 or more")

    @classmethod
    def uniform(cls, hosts: int, *, gbps: float, latency: float = 100e-6) -> DeclaredCluster:
        """`hosts` equal hosts."""
        return cls((gbps,) * hosts, latency)

    @property
    def hosts(self) -> int:
        """The number of hosts; they count from 0."""
        return len(self.gbps)

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """The card of each host in bytes/s."""
        return np.array(self.gbps) * 1e9 / 8

    def rate(self, host: int) -> float:
        """The card of a host in bytes/s."""
        return float(self.rates[host])

    def __str__(self) -> str:
        values = sorted(set(self.gbps))
        kinds = format_ints(values.index(rate) for rate in self.gbps)
        rates = ",".join(f"{rate!r}" for rate in values)
        return f"{self.hosts} hosts at {rates} Gbit/s, cards {kinds}, latency {self.latency!r} s"

    @classmethod
    def parse(cls, text: str) -> DeclaredCluster:
        """The cluster that prints as `text`.

        >>> cluster = DeclaredCluster((1.0, 2.5, 1.0))
        >>> DeclaredCluster.parse(str(cluster)) == cluster
        True
        """
        try:
            body, latency = text.removesuffix(" s").split(", latency ")
            head, cards = body.split(" Gbit/s, cards ")
            rates = [float(rate) for rate in head.split(" hosts at ")[1].split(",")]
            return cls(tuple(rates[card] for card in parse_ints(cards)), float(latency))
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"got the cluster {text!r}, expected one such as {str(cls((1.0, 1.0)))!r} ({error})"
            ) from error


def format_ints(values: Iterable[int]) -> str:
    """Whole numbers, with runs and repeats written short; `parse_ints` reads it.

    >>> format_ints([0, 1, 2, 3, 7, 7, 7, 5])
    '0-3,7*3,5'
    """
    runs: list[list[int]] = []  # first value, step (0 or 1), count
    for value in values:
        run = runs[-1] if runs else None
        if run and run[2] == 1 and value - run[0] in (0, 1):
            run[1:] = [value - run[0], 2]
        elif run and run[2] > 1 and value == run[0] + run[1] * run[2]:
            run[2] += 1
        else:
            runs.append([value, 1, 1])
    return ",".join(_run_text(*run) for run in runs)


def _run_text(first: int, step: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}" if step else f"{first}*{count}"


def parse_ints(text: str) -> tuple[int, ...]:
    """The numbers that `format_ints` wrote.

    >>> parse_ints("0-3,7*3,5")
    (0, 1, 2, 3, 7, 7, 7, 5)
    """
    values: list[int] = []
    for part in text.split(",") if text else []:
        if "*" in part:
            value, count = part.split("*")
            values += [int(value)] * int(count)
        else:
            first, _, last = part.partition("-")
            values += range(int(first), int(last or first) + 1)
    return tuple(values)
