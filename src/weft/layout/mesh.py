"""`Mesh`: ranks in an array, and the host of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.layout.ints import Ints, format_ints, parse_ints


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


def _flat(array: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(x) for x in array.reshape(-1))
