"""Memory for what arrives, used again as soon as nothing refers to it."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class Buffers:
    """Tensors of recurring sizes. A buffer is free again when the last tensor in its memory is gone.

    So nobody has to give it back: what a stage keeps for its backward pass, sends on, or returns as a view holds the
    buffer for just as long. Their number is what the schedule holds at once, which the order of actions bounds.

    >>> buffers = Buffers()
    >>> a = buffers.take((2, 3), torch.float32)
    >>> b = buffers.take((2, 3), torch.float32)
    >>> del a
    >>> c = buffers.take((3, 2), torch.float32)
    >>> buffers.count, c.data_ptr() != b.data_ptr()
    (2, True)
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many there are, used or free."""
        return sum(map(len, self._free.values()))

    @property
    def nbytes(self) -> int:
        """How much memory they have."""
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialised tensor; on the CPU in memory that was used before, where there is some."""
        if device is not None and device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)  # torch has a pool of its own there
        nbytes = math.prod(shape) * dtype.itemsize
        size = _rounded(nbytes)
        with self._lock:
            buffers = self._free.setdefault(size, [])
            memory = next((buffer for buffer in buffers if _is_free(buffer)), None)
            if memory is None:
                memory = torch.empty(size, dtype=torch.uint8)
                buffers.append(memory)
            # A view is a tensor of its own: it is what keeps the memory from being free.
            return memory[:nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Lets go of all memory that nothing refers to."""
        with self._lock:
            self._free.clear()


def _rounded(nbytes: int) -> int:
    """Up by an eighth at most, so that tensors of about the same size can follow each other in one buffer.

    >>> _rounded(1000), _rounded(1 << 20), _rounded((1 << 20) + 1)
    (1024, 1048576, 1179648)
    """
    unit = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(unit, -(-nbytes // unit) * unit)


def _is_free(buffer: Tensor) -> bool:
    # Two references: of `buffer` itself, and of the storage object that is asked.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2
