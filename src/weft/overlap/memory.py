"""Buffers and counters that an op's ranks share, made once and used again.

Calls use two *banks* in turn. A rank enters call c + 1 only when it has left call c, and in call c + 1 all ranks hear
that all have entered it. So when call c + 2 starts, nobody reads the bank of call c any more, and it may be
overwritten at once: no rank ever waits for a buffer. What counts as a call is one that all ranks have met for: one that
was refused before, on some ranks or on all, leaves the next one its bank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm import Counters, Window
from weft.comm.tags import Line

_SMALLEST_BYTES = 1 << 20
_SMALLEST_COUNTERS = 1024


def size_class(need: int, smallest: int) -> int:
    """`need` rounded up, so that slightly different sizes share a buffer: to a quarter of a power of two.

    >>> [size_class(n, 4) for n in (1, 5, 17, 100)]
    [4, 5, 20, 112]
    """
    size = max(need, smallest)
    step = max(1, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


@dataclass(frozen=True)
class Need:
    """What a call needs of its bank: shared bytes and counters, and private bytes. The same on all ranks."""

    shared_bytes: int
    counters: int
    private_bytes: int = 0


class Bank:
    """The memory of every other call: a window, or private memory where no rank shares the host."""

    def __init__(self, pg: ProcessGroup, line: Line, *, windows: bool, timeout: float) -> None:
        self._pg, self._timeout, self._line = pg, timeout, line
        self._windows = windows
        self._rank = pg.rank()
        self._window: Window | None = None
        self._shared = torch.empty(0, dtype=torch.uint8)
        self._private = torch.empty(0, dtype=torch.uint8)
        self._own = Counters(0)
        self.bound: dict[object, object] = {}  # tables over this memory, by plan

    def lacks(self, need: Need) -> bool:
        """Whether `grow`, which is collective, must come first."""
        return self._shared.numel() < need.shared_bytes or len(self._own) < need.counters

    def grow(self, need: Need) -> None:
        """Makes room. Collective where there are windows: all ranks have the same need."""
        nbytes = size_class(max(need.shared_bytes, self._shared.numel()), _SMALLEST_BYTES)
        counters = size_class(max(need.counters, len(self._own)), _SMALLEST_COUNTERS)
        self.bound.clear()
        with torch.inference_mode(False):  # views, too, are written to in whatever mode later calls are in
            if self._windows:
                self._window = Window.create(
                    self._pg, nbytes, counters_per_rank=counters, timeout=self._timeout, line=self._line
                )
                self._shared, self._own = self._window.local, self._window.counters(self._rank)
            else:
                self._shared, self._own = _lasting(nbytes), Counters(counters)

    def private(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] that only this rank sees; its contents last for one call."""
        if self._private.numel() < nbytes:
            self.bound.clear()
            self._private = _lasting(size_class(nbytes, _SMALLEST_BYTES))
        return self._private[:nbytes]

    def shared(self, rank: int) -> Tensor:
        """The shared bytes of a rank of this host."""
        if rank == self._rank:
            return self._shared
        assert self._window is not None
        return self._window.peer(rank)

    def counters(self, rank: int) -> Counters:
        """The counters of a rank of this host."""
        if rank == self._rank:
            return self._own
        assert self._window is not None
        return self._window.counters(rank)


def _lasting(nbytes: int) -> Tensor:
    """uint8 [nbytes] that calls may write to in inference mode and outside of it, whichever the first one was in."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8)


def view(memory: Tensor, dtype: torch.dtype, at: int, rows: int, cols: int) -> Tensor:
    """[rows, cols] elements of `dtype`, from element `at` of the bytes `memory` on."""
    start = at * dtype.itemsize
    return memory[start : start + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)
