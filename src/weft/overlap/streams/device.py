"""The few things that the executor asks of a device: streams, the order between them, and whether it is capturing.

`cuda.py` is what GPUs have. `threads.py` is the same with threads for streams, so that all other code of this folder
runs where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from weft.kernels.triton import Late


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work before that point is done; never waits."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was put in; who puts it in does not wait for it."""

    def run(self, work: Callable[[], None]) -> None:
        """Puts in the kernels and collectives that `work` launches."""
        ...

    def record(self) -> Event:
        """The point after all that was put in so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is put in from now on starts after the event."""
        ...


class Device(Protocol):
    """A device, as one rank's calls on one group see it."""

    def current(self) -> Stream:
        """The stream on which the caller computes."""
        ...

    def side(self) -> Stream:
        """A stream of its own for communication, the same in every call."""
        ...

    def tiles_at_once(self) -> int:
        """How many tiles are computed at a time: groups that are not larger are not worth a signal."""
        ...

    def is_capturing(self) -> bool:
        """Whether work is recorded into a graph, so that nothing may be asked of the device."""
        ...

    def fetch(self, flag: Tensor) -> tuple[Tensor, Event]:
        """A copy of `flag` on the host, good after the event; the host does not wait."""
        ...

    def finish(self, *, seconds: float) -> None:
        """Where results are read by the caller's own thread: returns when they are there. On a GPU nothing."""
        ...

    def synchronize(self) -> None:
        """Returns when all work is done."""
        ...


def device_of(tensor: Tensor, late: Late) -> Device:
    """The device that a tensor is on. `late` is set when a thread of a stream fails, so that no kernel waits on."""
    if tensor.is_cuda:
        from weft.overlap.streams.cuda import CudaDevice

        return CudaDevice(tensor.device)
    from weft.overlap.streams.threads import ThreadDevice

    return ThreadDevice(late)
