"""What the threads of a rank share: who runs a job, how they wait for each other, and memory for what arrives.

Waits end when anything has failed.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.comm.deadline import at_work
from weft.reshard.executor.staging import Stopped

T = TypeVar("T")

_SLICE_SECONDS = 0.1


class ThreadPool:
    """Runs jobs beside the caller, each at once: on an idle thread or a new one, since jobs wait for each other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: Callable[[], None]) -> None:
        """Begins a job, which handles its own errors."""
        with self._lock:
            if self._closed:
                return
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(job)

    def close(self) -> None:
        """Lets the threads go, each at the end of its job."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := inbox.get()) is not None:
            with at_work():
                job()
                del job  # what it refers to may be freed
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


class Future(Generic[T]):
    """A value that one thread sets and others wait for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: list[T] = []

    def set(self, value: T) -> None:
        """Hands the value over."""
        self._value = [value]
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, stop: threading.Event) -> T:
        """The value, once it is there."""
        while not self._event.wait(_SLICE_SECONDS):
            if stop.is_set():
                raise Stopped
        return self.get()

    def poll(self, seconds: float) -> bool:
        """Whether it is there, after waiting for so long at most."""
        return self._event.wait(seconds)

    def get(self) -> T:
        """The value, which is there."""
        return self._value[0]


class PriorityLock:
    """Held by one at a time, the most urgent of those that want it first."""

    def __init__(self, stop: threading.Event) -> None:
        self._condition, self._stop = threading.Condition(), stop
        self._ready: set[int] = set()

    @contextmanager
    def held(self, urgency: int) -> Iterator[None]:
        """The block runs when nothing more urgent is ready or running."""
        with self._condition:
            self._ready.add(urgency)
            while min(self._ready) < urgency:
                self._condition.wait(_SLICE_SECONDS)
                if self._stop.is_set():
                    raise Stopped
        try:
            yield
        finally:
            with self._condition:
                self._ready.discard(urgency)
                self._condition.notify_all()


class ArrivalBuffers:
    """Tensors of recurring sizes. The memory of one is free again when torch frees its storage, and not before.

    So nobody has to give it back: a view, what autograd has saved, a numpy array, a storage that somebody kept, or a
    message under way all hold the storage, and with it the buffer. Their number is what the schedule holds at once,
    which the order of actions bounds; where sizes vary, memory of other sizes is kept up to as much again.

    >>> buffers = ArrivalBuffers()
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
