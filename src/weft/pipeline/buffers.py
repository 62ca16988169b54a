"""Memory for what arrives, used again as soon as nothing can reach it."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque

import torch
from torch import Tensor


class Buffers:
    """Tensors of recurring sizes. The memory of one is free again when torch frees its storage, and not before.

    So nobody has to give it back: a view, what autograd has saved, a numpy array, a storage that somebody kept, or a
    message under way all hold the storage, and with it the buffer. Their number is what the schedule holds at once,
    which the order of actions bounds; where sizes vary, memory of other sizes is kept up to as much again.

    >>> buffers = Buffers()
    >>> a = buffers.take((2, 3), torch.float32)
    >>> b = buffers.take((2, 3), torch.float32)
    >>> del a
    >>> c = buffers.take((3, 2), torch.float32)
    >>> buffers.count, c.data_ptr() != b.data_ptr()
    (2, True)
    """

    def __init__(self) -> None:
        # Deques: memory comes back whenever a storage is freed, also in the middle of `take`, so no lock may be needed.
        self._free: dict[int, deque[Tensor]] = {}
        self._lock = threading.Lock()
        self._peak = 0
        self.count = 0
        self.nbytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialised tensor; on the CPU in memory that was used before, where there is some."""
        if device is not None and device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)  # torch has a pool of its own there
        nbytes = math.prod(shape) * dtype.itemsize
        size = _rounded(nbytes)
        return _lease(self._memory(size), self._free[size])[:nbytes].view(dtype).view(shape)

    def _memory(self, size: int) -> Tensor:
        with self._lock:
            free = self._free.setdefault(size, deque())
            try:
                return free.popleft()
            except IndexError:
                self._make_room(size)
                self.count += 1
                self.nbytes += size
                return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _make_room(self, size: int) -> None:
        """Lets go of memory of other sizes until what is left is at most twice what was in use at once."""
        idle = sum(len(free) * each for each, free in self._free.items())
        self._peak = max(self._peak, self.nbytes - idle + size)
        for each, free in self._free.items():
            while self.nbytes + size > 2 * self._peak and free:
                free.pop()
                self.count -= 1
                self.nbytes -= each


def _lease(memory: Tensor, free: deque[Tensor]) -> Tensor:
    """`memory` as a tensor with a storage of its own; `free` gets it back when that storage is gone.

    The storage made of an array holds the array until it is freed itself, whoever holds it then and in whichever
    thread. Each lease is a new array object, so the end of one says nothing of another.
    """
    array = memory.numpy()
    weakref.finalize(array, free.append, memory).atexit = False
    return torch.from_numpy(array)


def _rounded(nbytes: int) -> int:
    """Up by an eighth at most, so that tensors of about the same size can follow each other in one buffer.

    >>> _rounded(1000), _rounded(1 << 20), _rounded((1 << 20) + 1)
    (1024, 1048576, 1179648)
    """
    unit = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(unit, -(-nbytes // unit) * unit)
