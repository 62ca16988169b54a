"""Memory of the other ranks, mapped here: what a tile is written to, and rows are copied from, without a message.

On GPUs it is torch's symmetric memory, where all ranks share a host; on a CPU a window.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import symmetric_memory
from weft.comm import Window
from weft.comm.tags import Line


class Peers(Protocol):
    """As many bytes and counters of every rank, all mapped."""

    nbytes: int

    def memory(self, rank: int) -> Tensor:
        """The bytes of a rank, uint8 [nbytes]."""
        ...

    def counters(self, rank: int) -> Tensor:
        """The counters of a rank, int32 [ranks]: one for each rank that writes there."""
        ...

    def barrier(self) -> None:
        """Holds the stream that is current until the streams of all ranks are here."""
        ...


class WindowPeers:
    """Peers in the window of a host."""

    def __init__(self, pg: ProcessGroup, nbytes: int, *, timeout: float) -> None:
        self.nbytes = nbytes
        self._size, self._timeout, self._passed = pg.size(), timeout, 0
        self._rank = pg.rank()
        self._window = Window.create(pg, nbytes, counters_per_rank=pg.size() + 1, timeout=timeout, line=Line.OVERLAP)

    def memory(self, rank: int) -> Tensor:
        return self._window.peer(rank)

    def counters(self, rank: int) -> Tensor:
        return self._window.counters(rank).tensor[: self._size]

    def barrier(self) -> None:
        self._passed += 1
        for rank in range(self._size):
            self._window.counters(rank).add(self._size)
        own = self._window.counters(self._rank)
        own.wait(self._size, self._passed * self._size, timeout=self._timeout, what="all ranks of the group")


class SymmetricPeers:
    """Peers in torch's symmetric memory. This has never run on a GPU."""

    def __init__(self, pg: ProcessGroup, nbytes: int, device: torch.device, *, timeout: float) -> None:
        symmetric = symmetric_memory()

        self.nbytes = -(-nbytes // 16) * 16
        self._size, self._milliseconds = pg.size(), int(timeout * 1000)
        total = self.nbytes + 4 * self._size
        own = symmetric.empty(total, dtype=torch.uint8, device=device)
        own.zero_()
        self._handle: Any = symmetric.rendezvous(own, pg.group_name)
        self._mapped = [self._handle.get_buffer(rank, (total,), torch.uint8) for rank in range(self._size)]

    def memory(self, rank: int) -> Tensor:
        mapped: Tensor = self._mapped[rank]
        return mapped[: self.nbytes]

    def counters(self, rank: int) -> Tensor:
        mapped: Tensor = self._mapped[rank]
        return mapped[self.nbytes :].view(torch.int32)

    def barrier(self) -> None:
        self._handle.barrier(0, self._milliseconds)


def can_map(pg: ProcessGroup, hosts: tuple[int, ...], like: Tensor) -> bool:
    """Whether all ranks map each other's memory. Collective on GPUs, where each asks for its own."""
    if len(set(hosts)) > 1:
        return False
    if not like.is_cuda:
        return True
    others = [i for i in range(torch.cuda.device_count()) if i != like.device.index]
    reaches = all(torch.cuda.can_device_access_peer(like.device, other) for other in others)
    answer = torch.tensor([int(reaches)])
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=pg)
    return bool(answer.item())


def map_peers(pg: ProcessGroup, nbytes: int, like: Tensor, *, timeout: float) -> Peers:
    """Maps `nbytes` bytes of every rank. Collective."""
    if like.is_cuda:
        return SymmetricPeers(pg, nbytes, like.device, timeout=timeout)
    return WindowPeers(pg, nbytes, timeout=timeout)
