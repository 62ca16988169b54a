"""What a group's context makes once and uses again: shared buffers, packed weights, and threads.

*Banks* are buffers and counters that the ranks of a host share. Calls use two of them in turn. A rank enters call c + 1
only when it has left call c, and in call c + 1 all ranks hear that all have entered it. So when call c + 2 starts,
nobody reads the bank of call c any more, and it may be overwritten at once: no rank ever waits for a buffer. What
counts as a call is one that all ranks have met for: one that was refused before, on some ranks or on all, leaves the
next one its bank.

*Outputs* are the caller's, and their memory comes back when the last tensor on it is gone. The next one takes it: new
pages cost more than the sum that is written to them, and most where a virtual machine has to ask its host for them.

*Packed weights* are kept as long as the dense ones that they come from. A *worker* is a thread that communicates while
the caller's thread computes.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import storage_id, weak_storage
from weft.comm import Counters, Window
from weft.comm.deadline import at_work
from weft.comm.tags import Line
from weft.errors import PeerTimeout
from weft.kernels import PackedWeight
from weft.kernels.freshness import Stamp

SMALLEST_BYTES = 1 << 20
"""Of a buffer."""
_SMALLEST_COUNTERS = 1024
_LARGE_OUTPUT = 1 << 20  # bytes: smaller ones the allocator has at hand


def size_class(need: int, smallest: int) -> int:
    """`need` rounded up, so that slightly different sizes share a buffer: to a quarter of a power of two.

    >>> [size_class(n, 4) for n in (1, 5, 17, 100)]
    [4, 5, 20, 112]
    """
    size = max(need, smallest)
    step = max(1, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class OutputMemory:
    """Memory for results: what the caller has dropped is used again, up to `most_bytes` that nobody uses.

    >>> memory = OutputMemory()
    >>> first = memory.empty(1024, 1024, dtype=torch.float32)
    >>> at = first.data_ptr()
    >>> del first
    >>> memory.empty(1024, 1024, dtype=torch.float32).data_ptr() == at
    True
    """

    def __init__(self, *, most_bytes: int = 256 << 20) -> None:
        # Lists, and no lock: memory comes back in any thread, also in one that is taking some right now.
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._most_bytes = most_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for the next results."""
        return sum(size * len(regions) for size, regions in list(self._free.items()))

    def empty(self, rows: int, cols: int, *, dtype: torch.dtype) -> Tensor:
        """[rows, cols], not initialised."""
        nbytes = rows * cols * dtype.itemsize
        if nbytes < _LARGE_OUTPUT:
            return torch.empty(rows, cols, dtype=dtype)
        size = size_class(nbytes, mmap.PAGESIZE)
        try:
            region = self._free[size].pop()
        except IndexError:
            region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                region.madvise(mmap.MADV_HUGEPAGE)
        owner = (ctypes.c_char * size).from_buffer(region)  # lives as long as the tensor's storage
        weakref.finalize(owner, self._take_back, size, region).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=rows * cols).view(rows, cols)

    def _take_back(self, size: int, region: mmap.mmap) -> None:
        if self.free_bytes + size > self._most_bytes:
            self._free.clear()  # of sizes that were in use once
        if size <= self._most_bytes:
            self._free[size].append(region)


@dataclass(frozen=True)
class Need:
    """What a call needs of its bank: shared bytes and counters. The same on all ranks."""

    shared_bytes: int
    counters: int


class Bank:
    """The memory of every other call: a window, or private memory where no rank shares the host."""

    def __init__(self, pg: ProcessGroup, line: Line, *, windows: bool, timeout: float) -> None:
        self._pg, self._timeout, self._line = pg, timeout, line
        self._windows, self._rank = windows, pg.rank()
        self._shared = {self._rank: torch.empty(0, dtype=torch.uint8)}  # of every rank of the host that shares memory
        self._counters = {self._rank: Counters(0)}
        self._private = torch.empty(0, dtype=torch.uint8)
        self.bound: dict[object, object] = {}  # tables over this memory, by plan
        self.growths = 0  # how often memory was made: a call in which it was says nothing about the next

    def lacks(self, need: Need) -> bool:
        """Whether `grow`, which is collective, must come first."""
        own = self._rank
        return self._shared[own].numel() < need.shared_bytes or len(self._counters[own]) < need.counters

    def grow(self, need: Need) -> None:
        """Makes room. Collective where there are windows: all ranks have the same need."""
        own = self._rank
        nbytes = size_class(max(need.shared_bytes, self._shared[own].numel()), SMALLEST_BYTES)
        counters = size_class(max(need.counters, len(self._counters[own])), _SMALLEST_COUNTERS)
        self._replaced()
        if not self._windows:
            self._shared, self._counters = {own: _lasting(nbytes)}, {own: Counters(counters)}
            return
        with torch.inference_mode(False):  # views, too, are written to in whatever mode later calls are in
            window = Window.create(self._pg, nbytes, counters_per_rank=counters, timeout=self._timeout, line=self._line)
            self._shared = {rank: window.peer(rank) for rank in window.ranks}
            self._counters = {rank: window.counters(rank) for rank in window.ranks}

    def private(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] that only this rank sees; its contents last for one call."""
        if self._private.numel() < nbytes:
            self._replaced()
            self._private = _lasting(size_class(nbytes, SMALLEST_BYTES))
        return self._private[:nbytes]

    def _replaced(self) -> None:
        self.bound.clear()
        self.growths += 1

    def shared(self, rank: int) -> Tensor:
        """The shared bytes of a rank of this host."""
        return self._shared[rank]

    def counters(self, rank: int) -> Counters:
        """The counters of a rank of this host."""
        return self._counters[rank]


def _lasting(nbytes: int) -> Tensor:
    """uint8 [nbytes] that calls may write to in inference mode and outside of it, whichever the first one was in."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8)


def view(memory: Tensor, dtype: torch.dtype, at: int, rows: int, cols: int) -> Tensor:
    """[rows, cols] elements of `dtype`, from element `at` of the bytes `memory` on."""
    start = at * dtype.itemsize
    return memory[start : start + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


@dataclass(frozen=True)
class _Entry:
    storage: Any  # a weak reference to it
    stamp: Stamp
    packed: PackedWeight


def pack(dense: Tensor) -> PackedWeight:
    """dense [N, K] in packed form, for ops that compute their own gradients: it watches no source."""
    return PackedWeight.from_dense(dense.detach())


class WeightCache:
    """Packs a plain weight on its first use in inference, and again when it has changed; in training, in every call.

    It goes by memory, not by the tensor object: a module may hand over a new view of its weight in every call (DTensor
    does). `weft.kernels.freshness` says what counts as a change.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._lock = threading.Lock()

    def packed(self, w: Tensor, *, transposed: bool = False) -> PackedWeight:
        """w [N, K], or its transpose, in packed form. `w` must not be written to meanwhile.

        A weight that requires a gradient is being trained: whoever wants no gradient hands it over detached.
        """
        dense = w.detach().t() if transposed else w.detach()
        if w.requires_grad:
            return pack(dense)
        storage = w.untyped_storage()
        key = (storage_id(storage), w.storage_offset(), w.shape, w.stride(), w.dtype, transposed)
        with self._lock:
            found = self._entries.get(key)
        if found is not None and not found.storage.expired() and found.stamp.holds([w]):
            return found.packed
        stamp = Stamp.of([w])  # before it is packed: a write in between must show
        packed = pack(dense)
        if packed.data.data_ptr() == dense.data_ptr():  # the same memory, which an entry here would keep for ever
            return packed
        with self._lock:
            for gone in [k for k, e in self._entries.items() if e.storage.expired()]:
                del self._entries[gone]
            self._entries[key] = _Entry(weak_storage(storage), stamp, packed)
        return packed


class WorkerJob:
    """Work that a thread does; `join` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[WorkerJob], None], on_error: Callable[[], None]) -> None:
        self._work = work
        self._on_error = on_error
        self._finished = threading.Event()
        self._agreed = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Does the work; called once, by the worker."""
        try:
            # A thread starts with gradients on, whatever its caller has; and only in this mode may it write to the
            # output of a caller that is in this mode.
            with torch.inference_mode():
                self._work(self)
        except BaseException as error:  # told to the caller by join()
            self.error = error
            self._on_error()
        finally:
            self._agreed.set()
            self._finished.set()

    def agreed(self) -> None:
        """The job says that all ranks are here."""
        self._agreed.set()

    def wait_until_agreed(self, *, seconds: float) -> None:
        """Returns when all ranks are here; raises what stopped the job before. `seconds` as in `join`."""
        if not self._agreed.wait(seconds):
            raise PeerTimeout("the communication thread to hear from all ranks", seconds=seconds)
        self.check()

    def check(self) -> None:
        """Raises what the job has raised so far."""
        if self.error is not None:
            raise self.error

    def is_finished(self) -> bool:
        """Whether `join` would return at once."""
        return self._finished.is_set()

    def join(self, *, seconds: float) -> None:
        """Waits for the end. `seconds` are beyond every deadline inside the job: only a bug reaches them."""
        if not self._finished.wait(seconds):
            raise PeerTimeout("the communication thread", seconds=seconds)
        self.check()


class Worker:
    """One daemon thread that runs jobs one after the other; started with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[WorkerJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[WorkerJob], None], *, on_error: Callable[[], None] = lambda: None) -> WorkerJob:
        """Hands over a job and returns at once; `on_error` runs in the thread when the job raises."""
        job = WorkerJob(work, on_error)
        if self._thread is None or not self._thread.is_alive():  # after a fork it is not
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def __del__(self) -> None:
        self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[WorkerJob | None]) -> None:
    # Not a method: the thread must not keep its worker alive.
    while (job := jobs.get()) is not None:
        with at_work():
            job.run()
            del job
