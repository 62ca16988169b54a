"""The few things that the executor asks of a device: streams, the order between them, and the other ranks' memory.

    protocol   on a GPU            on a CPU
    Device     CudaDevice          ThreadDevice, with threads for streams
    Peers      SymmetricPeers      WindowPeers

What is on a CPU exercises the code that GPUs run, order for order, with Triton's interpreter and gloo; it is not a fast
way to compute there. What is on a GPU has never run on one: it was type-checked, and its twin was run.

`Peers` is memory of the other ranks, mapped here: what a tile is written to, and rows are copied from, without a
message; where all ranks share a host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import stream_writes, symmetric_memory
from weft.comm import Window
from weft.comm.tags import Line
from weft.errors import LONGEST_SECONDS, PeerTimeout
from weft.kernels.triton import Late, tell
from weft.kernels.triton.budget import Budget, gather_budget
from weft.kernels.triton.launch import refuse_rocm
from weft.overlap.executor.resources import Worker, WorkerJob


class StreamEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work before that point is done; never waits."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was put in; who puts it in does not wait for it."""

    def run(self, work: Callable[[], None]) -> None:
        """Puts in the kernels and collectives that `work` launches."""
        ...

    def record(self) -> StreamEvent:
        """The point after all that was put in so far."""
        ...

    def wait(self, event: StreamEvent) -> None:
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

    def gather_budget(self, dtype: torch.dtype, *, messages: bool) -> Budget:
        """How many programs may wait for rows at once, so that what brings those has room."""
        ...

    def tell(self, progress: Tensor, step: int) -> None:
        """In the stream that is current: sets progress [1], int32, from step - 1 to step."""
        ...

    def is_capturing(self) -> bool:
        """Whether work is recorded into a graph, so that nothing may be asked of the device."""
        ...

    def fetch(self, flag: Tensor) -> tuple[Tensor, StreamEvent]:
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
        refuse_rocm()
        return CudaDevice(tensor.device)
    return ThreadDevice(late)


@dataclass(frozen=True)
class CudaStream:
    """A `torch.cuda.Stream`. This has never run on a GPU."""

    stream: torch.cuda.Stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> StreamEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)


class CudaDevice:
    """One GPU, with one stream for communication. This has never run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of high priority: a collective that is due takes the next free multiprocessor before the next tile does.
        self._side = CudaStream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        self._tiles = torch.cuda.get_device_properties(device).multi_processor_count
        major, minor = torch.cuda.get_device_capability(device)
        self._arch = f"sm{major}{minor}"

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def side(self) -> CudaStream:
        return self._side

    def tiles_at_once(self) -> int:
        return self._tiles

    def gather_budget(self, dtype: torch.dtype, *, messages: bool) -> Budget:
        return gather_budget(self._arch, self._tiles, dtype, messages=messages)

    def tell(self, progress: Tensor, step: int) -> None:
        """By the stream itself, which needs no place on a multiprocessor and fences what came before; else a kernel."""
        writes = stream_writes()
        if writes is None:
            tell(progress)
        elif self.is_capturing():  # a graph has no such writes in all of CUDA's versions that torch runs with
            writes.memset32(progress.view(torch.uint32), offset=0, val=step, count=1)
        else:
            writes.stream_write_value32(progress.view(torch.uint32), 0, step)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fetch(self, flag: Tensor) -> tuple[Tensor, StreamEvent]:
        on_host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        on_host.copy_(flag, non_blocking=True)
        return on_host, self.current().record()

    def finish(self, *, seconds: float) -> None:
        """Nothing: who reads the results does so in stream order."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


_TILES_AT_ONCE = 2  # so that matmuls of a few tiles already have groups
_GAVE_UP = 2**20


class ThreadEvent:
    """A point in a thread's work."""

    def __init__(self) -> None:
        self._past = threading.Event()

    def query(self) -> bool:
        return self._past.is_set()

    def pass_(self) -> None:
        self._past.set()

    def wait(self) -> None:
        """Every wait before the event has its own deadline, so this one ends."""
        if not self._past.wait(LONGEST_SECONDS):
            raise PeerTimeout("a point in another stream", seconds=LONGEST_SECONDS)


class ThreadStream:
    """One thread. After an error the rest of a call's work is left out; its events pass all the same."""

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._worker = Worker(name)
        self._on_error = on_error
        self._failed = False
        self._jobs: list[WorkerJob] = []

    def run(self, work: Callable[[], None]) -> None:
        def unless_failed(job: WorkerJob) -> None:
            if not self._failed:
                work()

        self._jobs.append(self._worker.start(unless_failed, on_error=self._fail))

    def record(self) -> StreamEvent:
        event = ThreadEvent()
        self._jobs.append(self._worker.start(lambda job: event.pass_()))
        return event

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, ThreadEvent)
        self._jobs.append(self._worker.start(lambda job: event.wait()))

    def _fail(self) -> None:
        self._failed = True
        self._on_error()

    def join(self, *, seconds: float) -> None:
        """Returns when all is done; raises the first error."""
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.join(seconds=seconds)
        finally:
            self._failed = False


class ThreadDevice:
    """The CPU with two threads for streams."""

    def __init__(self, late: Late) -> None:
        def give_up() -> None:  # kernels that wait for what a thread no longer does
            late.flag.fill_(_GAVE_UP)

        self._current = ThreadStream("weft-stream-compute", give_up)
        self._side = ThreadStream("weft-stream-side", give_up)

    def current(self) -> ThreadStream:
        return self._current

    def side(self) -> ThreadStream:
        return self._side

    def tiles_at_once(self) -> int:
        return _TILES_AT_ONCE

    def gather_budget(self, dtype: torch.dtype, *, messages: bool) -> Budget:
        return Budget(_TILES_AT_ONCE, f"{_TILES_AT_ONCE} programs, one after the other")

    def tell(self, progress: Tensor, step: int) -> None:
        tell(progress)

    def is_capturing(self) -> bool:
        return False

    def fetch(self, flag: Tensor) -> tuple[Tensor, StreamEvent]:
        event = ThreadEvent()
        event.pass_()
        return flag.clone(), event

    def finish(self, *, seconds: float) -> None:
        try:
            self._side.join(seconds=seconds)  # first: its error is the reason of the other's
        finally:
            self._current.join(seconds=seconds)

    def synchronize(self) -> None:
        self.finish(seconds=LONGEST_SECONDS)


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
    """Peers in the window of a host. Barriers are counted without end: the counters of windows go round."""

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
