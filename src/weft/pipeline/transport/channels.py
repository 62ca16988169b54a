"""Channels: the tensors of a route, one after the other, each by the reshard plan of its shape.

Channels of all routes run beside each other, each on a thread that is there while there is something to move. What
arrives once on a host and several of its ranks need goes through memory that they share: one window for all
channels, cut up, since their plans are known to their own ranks only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from weft.comm import Window
from weft.comm.tags import CHUNKS_PER_CHANNEL, channel_tags, is_inherited
from weft.comm.tell import store_of
from weft.errors import LONGEST_SECONDS, PeerLost
from weft.layout.mesh import DeclaredCluster
from weft.pipeline.schedules.lowered import TensorTransfer
from weft.pipeline.transport.connections import Connections, FailureStore, StageFailed
from weft.pipeline.transport.routes import Placing, RouteLayouts, Routes
from weft.pipeline.transport.threads import ArrivalBuffers, ThreadPool
from weft.reshard.executor.parts import Parts, check_locals
from weft.reshard.executor.script import Ring, Script, ScriptWriter
from weft.reshard.executor.staging import Rings, Slots, counters_for
from weft.reshard.executor.workers import Assignment, Pending, PlanRun
from weft.reshard.plan import Plan
from weft.reshard.planner import plan_tensors
from weft.reshard.spec import TensorSpec, check_options

_SMALLEST_CHUNK, _LARGEST_CHUNK = 256 << 10, 1 << 20
_CHUNKS_PER_TENSOR = 8
_SLOTS = Slots(size=_LARGEST_CHUNK + (_LARGEST_CHUNK >> 3), receive=8, send=8, share=8)
_RING_SLOTS = {Ring.RECEIVED: _SLOTS.receive, Ring.OWN: _SLOTS.share}
_CHANNEL_BYTES = sum(_RING_SLOTS.values()) * _SLOTS.size


class Payload(Enum):
    """What transfers carry."""

    TENSORS = "tensors"
    SIGNALS = "signals"  # a few bytes in place of each tensor, whose values are then 0: the speed without a network


@dataclass(frozen=True)
class ChannelOptions:
    """How tensors are moved; what reshard's planner takes, and what is moved."""

    strategy: str = "optimal"
    cluster: DeclaredCluster | None = None
    chunk_bytes: int | None = None
    payload: Payload = Payload.TENSORS

    def __post_init__(self) -> None:
        check_options(self.strategy, self.chunk_bytes)


class Channels:
    """All channels of one rank, and what it keeps for them from step to step. Made by all ranks together.

    layouts:  how each route's tensors lie on both sides
    buffers:  memory for what arrives; `zeros` in place of it where only signals are sent
    devices:  of each stage of this rank: where what arrives for it is put
    threads:  on which channels run
    lost:     ranks whose connection to this one is gone
    stop:     set when anything has failed
    """

    def __init__(
        self,
        connections: Connections,
        placing: Placing,
        routes: Routes,
        options: ChannelOptions,
        devices: Mapping[int, torch.device],
    ) -> None:
        """`routes` has all channels that any step will use, `devices` where each stage of this rank computes."""
        self.total = routes.total
        channel_tags(max(0, self.total - 1))  # on all ranks alike, before any waits for another
        self.connections, self.payload, self.devices = connections, options.payload, dict(devices)
        self.rank = connections.world[connections.rank]
        self.failures = FailureStore(store_of(connections.short.pg), self.rank)
        self.threads, self.stop = ThreadPool("weft-pipeline"), threading.Event()
        self.failure: BaseException | None = None
        self.lost: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.buffers = ArrivalBuffers()
        self.zeros: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        self.layouts = {route: placing.layouts(route) for route in routes.channels}
        self._window = self._share() if any(each.shares_memory for each in self.layouts.values()) else None
        planner = ChannelPlanner(self.rank, options)
        self.of = {
            number: Channel(number, self, layouts, planner)
            for route, layouts in self.layouts.items()
            if self.rank in layouts.ranks
            for number in range(routes.first_channel[route], routes.first_channel[route] + routes.channels[route])
        }
        here = [layouts.ranks for layouts in self.layouts.values() if self.rank in layouts.ranks]
        for peer in {rank for ranks in here for rank in ranks} - {self.rank}:
            self.threads.start(partial(self._watch, peer))

    @property
    def _counters(self) -> int:
        """How many counters a channel has on each rank."""
        hosts = self.connections.hosts
        return counters_for(max(hosts.count(host) for host in hosts))

    def _share(self) -> Window:
        """Memory for all channels; pages that no channel touches are never there. Collective."""
        group, counters = self.connections.short, self.total * self._counters
        return Window.create(group.pg, self.total * _CHANNEL_BYTES, counters_per_rank=counters, timeout=group.timeout)

    def rings(self, channel: int, layouts: RouteLayouts) -> Rings:
        """A channel's part of the shared memory, if it has any."""
        return Rings(
            self._window if layouts.shares_memory else None,
            self.connections.world,
            rank=self.rank,
            counts=_RING_SLOTS,
            slot_bytes=_SLOTS.size,
            first_byte=channel * _CHANNEL_BYTES,
            first_counter=channel * self._counters,
        )

    def _watch(self, peer: int) -> None:
        """Notes that a rank is gone, also one of the same host, whose memory tells nothing."""
        self.connections.wait_for_loss(peer)
        self.lost.add(peer)

    def fail(self, error: BaseException, text: str) -> BaseException:
        """Tells all ranks of the first thing that went wrong, and ends all waits; returns what to raise."""
        with self._lock:
            if self.failure is None:
                first = self.failures.post(text)
                if first == text:
                    # A lost connection says nothing of what was lost with it.
                    self.failure = PeerLost(text) if isinstance(error, PeerLost) else error
                else:
                    self.failure = StageFailed(first)
                self.stop.set()
                self.connections.break_off()
            return self.failure

    def fail_transfer(self, error: BaseException, transfer: TensorTransfer, routes: Routes) -> None:
        """`fail`, for a transfer of a step."""
        maker = routes.maker(transfer).in_words() if transfer in routes.messages else str(transfer)
        what = f"{type(error).__name__}: {error}"
        self.fail(error, f"{transfer}, which {maker} makes, failed on rank {self.rank}: {what}")

    def close(self) -> None:
        """Ends threads and groups; not while a step runs. Waits for the other ranks, unless something had failed."""
        self._close(together=self.failure is None)

    def abandon(self) -> None:
        """`close` without the others, for a pipeline that nobody closed. They lose this rank in their next step."""
        if not is_inherited(self.connections.short.pg):  # a fork has the connections, but not the threads that end them
            self._close(together=False)

    def _close(self, *, together: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self.stop.set()
        self.connections.close(together=together)
        self.threads.close()
        if self._window is not None:
            self._window.close()


class Channel:
    """Moves what it is given in the order of `put`, one at a time."""

    def __init__(self, number: int, channels: Channels, layouts: RouteLayouts, planner: ChannelPlanner) -> None:
        self.number, self.layouts = number, layouts
        self._channels, self._planner = channels, planner
        self._rings, self._tags = channels.rings(number, layouts), channel_tags(number)
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._lock = threading.Lock()

    def put(self, job: Callable[[], None]) -> None:
        """Runs `job` on a thread after those put before; it handles its own errors."""
        with self._lock:
            self._queue.append(job)
            if self._is_running:
                return
            self._is_running = True
        self._channels.threads.start(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                job = self._queue.popleft()
            job()

    def assign(self, shape: tuple[int, ...], dtype: torch.dtype) -> Assignment:
        """This rank's part in moving a tensor of that shape."""
        plan, script = self._planner.plan(self.layouts, shape, dtype)
        return Assignment(plan, script, self._channels.rank, self._channels.connections.world, _SLOTS, self._tags)

    def move(
        self,
        job: Assignment,
        *,
        src: Tensor | None = None,
        dst: Tensor | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Moves one tensor with this rank's shards; returns when its part is done. `on_bytes` hears what lands.

        Waits have no deadline here: whoever needs the tensor has one.
        """
        run = PlanRun(
            job,
            _parts(job, src, "src"),
            _parts(job, dst, "dst"),
            self._channels.connections,
            self._rings,
            timeout=LONGEST_SECONDS,
            stop=self._channels.stop,
            on_bytes=on_bytes,
        )
        workers = run.workers()
        if len(workers) == 1:
            workers[0].run()  # on this thread, which is the channel's own
        else:
            Pending(run, workers).wait()


def _parts(job: Assignment, tensor: Tensor | None, side: str) -> Parts:
    tensors = {} if tensor is None else {0: tensor}
    boxes = check_locals(job.plan, job.rank, tensors, side)
    return Parts(job.plan, {index: tensors[index].detach() for index in boxes}, boxes)


class ChannelPlanner:
    """Plans, and this rank's part of them, by route, shape and type: each is made once."""

    def __init__(self, rank: int, options: ChannelOptions) -> None:
        self._rank, self._options = rank, options
        self._known: dict[tuple[RouteLayouts, tuple[int, ...], torch.dtype], tuple[Plan, Script]] = {}
        self._lock = threading.Lock()

    def plan(self, layouts: RouteLayouts, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Plan, Script]:
        """The plan that moves a tensor between these layouts."""
        key = (layouts, shape, dtype)
        with self._lock:
            if key not in self._known:
                spec = TensorSpec(layouts.name, shape, dtype, layouts.src, layouts.dst, dtype)
                wanted = self._options.chunk_bytes or spec.nbytes // _CHUNKS_PER_TENSOR
                plan = plan_tensors(
                    [spec],
                    cluster=self._options.cluster,
                    strategy=self._options.strategy,
                    chunk_bytes=max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, wanted)),
                )
                _check_chunks(plan, layouts.name)
                self._known[key] = (plan, ScriptWriter(plan).of(self._rank))
            return self._known[key]


def _check_chunks(plan: Plan, name: str) -> None:
    largest = int((plan.chunks.stop - plan.chunks.start).max(initial=0))
    if len(plan.chunks) > CHUNKS_PER_CHANNEL - 1 or largest > _SLOTS.size:
        raise ValueError(
            f"{name} takes {len(plan.chunks)} chunks of up to {largest} bytes, expected fewer than "
            f"{CHUNKS_PER_CHANNEL} of up to {_SLOTS.size}; use more micro-batches"
        )
