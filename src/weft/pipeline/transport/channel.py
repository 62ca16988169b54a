"""Memory that the ranks of a host share, for what arrives there once and several of them need: one window, cut up.

`reshard.staging.Rings` is one ring for one plan, made by all ranks together. A channel of a pipeline carries
tensors of any shape, one after the other, and its plans are known to its own ranks only. Here the window is made
once; each run of a channel begins with its rings empty, and counts go on from run to run.

A channel: tensors of one route, one after the other, each by the reshard plan of its shape.

Channels of all routes run beside each other, each on a thread that is there while there is something to move.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Counters, Window
from weft.comm.tags import CHUNKS_PER_CHANNEL, Span, channel_tags
from weft.layout import Layout
from weft.layout.mesh import DeclaredCluster
from weft.pipeline.transport.connections import Connection, Connections
from weft.pipeline.transport.threads import Crew
from weft.reshard.executor.executor import Executor, Pending, check_locals
from weft.reshard.executor.lanes import LandingLane, Lane, OutgoingLane, TakingLane
from weft.reshard.executor.parts import Parts
from weft.reshard.executor.script import Ring, Script, ScriptWriter
from weft.reshard.executor.staging import Rings, Slots, Wait
from weft.reshard.plan import Plan
from weft.reshard.planner import plan_tensors
from weft.reshard.spec import TensorSpec
from weft.reshard.units import Ranks

LARGEST_CHUNK = 1 << 20
SLOTS = Slots(size=LARGEST_CHUNK + (LARGEST_CHUNK >> 3), receive=8, send=8, share=8)
_RING_BYTES = SLOTS.size * SLOTS.receive
_CHANNEL_BYTES = 2 * _RING_BYTES
_FAILED, _READY, _DONE = 0, 1, 3


@dataclass(frozen=True)
class SharedMemory:
    """The window of all channels of a pipeline; pages that no channel touches are never there."""

    window: Window
    counters_per_channel: int
    world: Ranks

    @classmethod
    def create(cls, wires: Connections, channels: int) -> SharedMemory:
        """Collective over the wires."""
        neighbours = max(wires.hosts.count(host) for host in set(wires.hosts))
        counters = _DONE + 2 * neighbours
        group = wires.notes
        window = Window.create(
            group.pg, channels * _CHANNEL_BYTES, counters_per_rank=channels * counters, timeout=group.timeout
        )
        return cls(window, counters, wires.world)


class ChannelRings(Rings):
    """The rings of one channel, for the ranks of this host. Runs of it follow each other."""

    def __init__(self, shared: SharedMemory, channel: int, me: int) -> None:
        self._shared, self._channel, self._me = shared, channel, me
        members = shared.window.ranks
        self._members = {shared.world[member]: member for member in members}
        self._places = {shared.world[member]: i for i, member in enumerate(members)}
        first, count = channel * shared.counters_per_channel, shared.counters_per_channel
        self._counters = {
            rank: Counters.over(shared.window.counters(member).tensor[first : first + count])
            for rank, member in self._members.items()
        }
        self._memory: dict[tuple[int, Ring, int], Tensor] = {}
        self._published: dict[tuple[int, Ring], int] = {}
        self._taken: dict[tuple[Ring, int], int] = {}

    def begin(self, wait: Wait) -> None:
        """Returns when all that this rank published in earlier runs has been taken."""
        for (ring, taker), count in self._taken.items():
            index = self._done_index(ring, self._places[taker])
            own = self._counters[self._me]
            wait.until(own, index, count, own, lambda taker=taker: f"rank {taker} to copy what came before")  # type: ignore[misc]

    def end(self, script: Script) -> None:
        """Counts what a run has published and taken, on all ranks of the host alike."""
        for key, count in script.totals.items():
            self._published[key] = self._published.get(key, 0) + count
        for ring, published in script.published.items():
            for takers in published:
                for taker in takers:
                    self._taken[ring, taker] = self._taken.get((ring, taker), 0) + 1

    def slot(self, head: int, ring: Ring, number: int, nbytes: int) -> Tensor:
        """The memory of a published chunk: uint8 [nbytes]."""
        key = (head, ring, number % SLOTS.receive)
        if key not in self._memory:
            offset = self._channel * _CHANNEL_BYTES + ring.value * _RING_BYTES + key[2] * SLOTS.size
            member = self._members[head]
            self._memory[key] = self._shared.window.view(member, (SLOTS.size,), torch.uint8, offset=offset)
        return self._memory[key][:nbytes]

    def slots_of(self, ring: Ring) -> int:
        """How many chunks of a ring are there at once."""
        return SLOTS.receive

    def publish(self, ring: Ring) -> None:
        """Says that the next chunk of this rank's ring is there."""
        self._counters[self._me].add(_READY + ring.value)

    def _ready(self, head: int, ring: Ring, number: int) -> tuple[int, int]:
        """The counter of `head` that tells of chunk `number` of this run, and from which value on."""
        return _READY + ring.value, self._published.get((head, ring), 0) + number + 1

    def wait_done(self, ring: Ring, taker: int, count: int, wait: Wait, what: Callable[[], str]) -> None:
        """Returns when `taker` is done with `count` chunks of this run."""
        value = self._taken.get((ring, taker), 0) + count
        own = self._counters[self._me]
        wait.until(own, self._done_index(ring, self._places[taker]), value, own, what)

    def fail(self) -> None:
        """Tells the ranks of this host that this one gave up."""
        for rank, counters in self._counters.items():
            if rank != self._me:
                counters.add(_FAILED)

    def close(self) -> None:
        """Lets go of the window."""
        self._counters, self._memory = {}, {}

    def _done_index(self, ring: Ring, place: int) -> int:
        return _DONE + 2 * place + ring.value


class NoRings(ChannelRings):
    """For a channel between ranks of which no two that need the same share a host."""

    def __init__(self) -> None:
        self._counters, self._memory, self._taken, self._published = {}, {}, {}, {}


_SMALLEST_CHUNK = 256 << 10
_CHUNKS_PER_TENSOR = 8


@dataclass(frozen=True)
class Way:
    """From a layout to another one: what the plans of a route have in common."""

    name: str
    src: Layout
    dst: Layout


class ChannelPlanner:
    """Plans, and this rank's part of them, by way, shape and type: each is made once."""

    def __init__(self, rank: int, *, strategy: str, cluster: DeclaredCluster | None, chunk_bytes: int | None) -> None:
        self._rank, self._strategy, self._cluster, self._chunk_bytes = rank, strategy, cluster, chunk_bytes
        self._known: dict[tuple[Way, tuple[int, ...], torch.dtype], tuple[Plan, Script]] = {}
        self._lock = threading.Lock()

    def plan(self, way: Way, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Plan, Script]:
        """The plan that moves a tensor that way."""
        key = (way, shape, dtype)
        with self._lock:
            if key not in self._known:
                spec = TensorSpec(way.name, shape, dtype, way.src, way.dst, dtype)
                chunk = self._chunk_bytes or spec.nbytes // _CHUNKS_PER_TENSOR
                chunk = max(_SMALLEST_CHUNK, min(LARGEST_CHUNK, chunk, LARGEST_CHUNK))
                plan = plan_tensors([spec], cluster=self._cluster, strategy=self._strategy, chunk_bytes=chunk)
                _check_chunks(plan, way)
                self._known[key] = (plan, ScriptWriter(plan).of(self._rank))
            return self._known[key]


def _check_chunks(plan: Plan, way: Way) -> None:
    largest = int((plan.chunks.stop - plan.chunks.start).max(initial=0))
    if len(plan.chunks) > CHUNKS_PER_CHANNEL - 1 or largest > SLOTS.size:
        raise ValueError(
            f"{way.name} takes {len(plan.chunks)} chunks of up to {largest} bytes, expected fewer than "
            f"{CHUNKS_PER_CHANNEL} of up to {SLOTS.size}; use more micro-batches"
        )


class _Mover(Executor):
    """An executor for one run of a plan that both sides know of, in the rings of a channel."""

    def __init__(
        self, plan: Plan, script: Script, wire: Connection, rings: ChannelRings, wires: Connections, tags: Span
    ) -> None:
        self.plan, self.script, self.group, self.rings, self.slots, self.tags = plan, script, wire, rings, SLOTS, tags
        self._world, self.rank = wires.world, wires.world[wires.rank]


class _ChannelLane(Lane):
    """A lane of a pipeline: it stops when any other does, and breaks off all connections, not those of one group."""

    def __init__(
        self,
        mover: _Mover,
        src: Parts,
        dst: Parts,
        wires: Connections,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        super().__init__(mover, src, dst, 0, None, on_bytes)
        self._wires = wires
        self.wait = Wait(mover.group.timeout, stop)

    def break_off(self) -> None:
        self._wires.break_off()


class Channel:
    """Moves what it is given in the order of `put`, one at a time."""

    def __init__(self, number: int, wires: Connections, rings: ChannelRings, crew: Crew, stop: threading.Event) -> None:
        self.number = number
        self._wires, self._rings, self._crew, self._stop = wires, rings, crew, stop
        self._wire, self._tags = Connection(wires), channel_tags(number)
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
        self._crew.start(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                job = self._queue.popleft()
            job()

    def move(
        self,
        plan: Plan,
        script: Script,
        src: Tensor | None,
        dst: Tensor | None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Carries out a plan with this rank's shards; returns when its part is done. `on_bytes` hears what lands."""
        mover = _Mover(plan, script, self._wire, self._rings, self._wires, self._tags)
        before, after = _parts(mover, src, "src"), _parts(mover, dst, "dst")
        lane = _ChannelLane(mover, before, after, self._wires, self._stop, on_bytes or _ignore)
        self._rings.begin(lane.wait)
        works = [work for work in (LandingLane(lane), OutgoingLane(lane), TakingLane(lane)) if work.has_work]
        if len(works) == 1:
            works[0].run()  # on this very thread
        else:
            Pending(mover, lane).wait()
        self._rings.end(script)


def _parts(mover: _Mover, tensor: Tensor | None, side: str) -> Parts:
    tensors = {} if tensor is None else {0: tensor}
    boxes = check_locals(mover.plan, mover.rank, tensors, side)
    return Parts(mover.plan, {index: tensors[index].detach() for index in boxes}, boxes)


def _ignore(_: int) -> None:
    pass
