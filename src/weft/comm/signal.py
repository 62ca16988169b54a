"""Counters that one thread or process raises and another waits on.

A producer bumps a counter when a tile, a group of tiles or a buffer is ready; a consumer sleeps until the
counter has reached the value it needs. The counters are 32-bit words in process memory or in a shared
`Window`, the sleep is a futex, and both are done by the native core without the GIL. Everything that a thread
wrote before its `add` is visible to whoever returns from a `wait` that the `add` satisfied.

Counters go round after 2^32, so that runs may be of any length: a count that both sides keep as a plain number,
however large, has been reached when the counter is less than 2^31 ahead of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft import _core
from weft.comm.deadline import Deadline
from weft.errors import PeerTimeout

# A signal handler (Ctrl-C) runs only when the native wait returns to Python, so long waits are cut into
# slices.
_SLICE_SECONDS = 0.5


class Counters:
    """`n` counters, all 0 at first, numbered from 0.

    >>> ready = Counters(4)
    >>> ready.add(2)
    >>> ready.wait(2, 1, timeout=5.0, what="tile group 2")
    >>> ready.read(2), len(ready)
    (1, 4)

    `Counters.over(tensor)` puts them over memory that exists already, such as a view of a shared window.
    """

    def __init__(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"number of counters is {n}, expected 0 or more")
        with torch.inference_mode(False):  # they may outlive the caller's
            self._bind(torch.zeros(n, dtype=torch.int32, device="cpu"))

    @classmethod
    def over(cls, tensor: Tensor) -> Counters:
        """Counters over `tensor`: int32 [n] on the CPU, contiguous. Its present values count; nothing is
        copied.
        """
        checks = (
            ("dtype", tensor.dtype, torch.int32, tensor.dtype == torch.int32),
            ("device", tensor.device.type, "cpu", tensor.device.type == "cpu"),
            ("number of dims", tensor.dim(), 1, tensor.dim() == 1),
            ("contiguous", tensor.is_contiguous(), True, tensor.is_contiguous()),
            ("address modulo 4", tensor.data_ptr() % 4, 0, tensor.data_ptr() % 4 == 0),
        )
        for name, got, expected, good in checks:
            if not good:
                raise ValueError(
                    f"{name} of the counters' tensor is {got}, expected {expected}; "
                    "give a torch.zeros(n, dtype=torch.int32) or Window.counters"
                )
        counters = cls.__new__(cls)
        counters._bind(tensor)
        return counters

    def _bind(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._address = tensor.data_ptr()

    @property
    def tensor(self) -> Tensor:
        """The int32 [n] words themselves. Do not write to them while someone adds or waits."""
        return self._tensor

    def __len__(self) -> int:
        return self._tensor.numel()

    def add(self, index: int, value: int = 1) -> None:
        """Adds `value` (release order) and wakes every waiter of counter `index`."""
        _core.counter_add(self._word(index), value)

    def read(self, index: int) -> int:
        """The present value of counter `index` (acquire order), as a signed number of 32 bits."""
        return _core.counter_read(self._word(index))

    def has_reached(self, index: int, value: int) -> bool:
        """Whether `wait` would return at once.

        >>> counters = Counters(1)
        >>> counters.add(0, 2**31 - 1)
        >>> counters.add(0, 2)
        >>> counters.has_reached(0, 2**31 + 1), counters.has_reached(0, 2**31 + 2)
        (True, False)
        """
        return (self.read(index) - value) % 2**32 < 2**31

    def wait(self, index: int, value: int, *, timeout: float, what: str) -> None:
        """Sleeps until counter `index` has reached `value`; `PeerTimeout` names `what` after `timeout`
        seconds.
        """
        word = self._word(index)
        deadline = Deadline.after(timeout)
        while not _core.counter_wait(word, value, min(deadline.left(), _SLICE_SECONDS)):
            if deadline.left() == 0.0:
                raise PeerTimeout(f"{what} (counter {index} is {self.read(index)}, awaited {value})", seconds=timeout)

    def take(
        self, index: int, value: int, source: Tensor, into: Tensor, *, done: tuple[Counters, int], timeout: float
    ) -> bool:
        """Waits as `wait` does, copies `source` to `into`, and adds 1 to `done`: counters and an index. All native.

        Both are contiguous CPU tensors of as many bytes. False, with nothing copied, after `timeout` seconds.

        >>> ready, taken, out = Counters(1), Counters(1), torch.zeros(3)
        >>> ready.add(0)
        >>> ready.take(0, 1, torch.ones(3), out, done=(taken, 0), timeout=1.0), out.tolist(), taken.read(0)
        (True, [1.0, 1.0, 1.0], 1)
        """
        if source.nbytes != into.nbytes or not (source.is_contiguous() and into.is_contiguous()):
            raise ValueError(
                f"got {source.nbytes} bytes with strides {source.stride()} to be copied to {into.nbytes} with strides "
                f"{into.stride()}, expected contiguous tensors of one size"
            )
        counters, at = done
        return _core.counter_take(
            self._word(index), value, timeout, source.data_ptr(), into.data_ptr(), into.nbytes, counters._word(at)
        )

    def reset(self) -> None:
        """Sets all counters to 0. Only when no other thread or process uses them: a concurrent `add` may be
        lost.
        """
        self._tensor.zero_()

    def _word(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise ValueError(f"counter index is {index}, expected 0 <= index < {len(self)}")
        return self._address + 4 * index

    def __repr__(self) -> str:
        return f"Counters({self._tensor.tolist()})"
