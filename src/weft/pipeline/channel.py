"""A channel: tensors of one route, one after the other, each by the reshard plan of its shape.

Channels of all routes run beside each other, each on a thread that is there while there is something to move.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.cluster import Cluster
from weft.comm.tags import CHUNKS_PER_CHANNEL, Span, channel_tags
from weft.layout import Layout
from weft.pipeline.crew import Crew
from weft.pipeline.rings import LARGEST_CHUNK, SLOTS, ChannelRings
from weft.pipeline.wires import Wire, Wires
from weft.reshard.execute import Executor, Pending, check_locals
from weft.reshard.lanes import Landing, Lane, Outgoing, Taking
from weft.reshard.parts import Parts
from weft.reshard.plan import Plan
from weft.reshard.planner import plan_tensors
from weft.reshard.script import Script, ScriptWriter
from weft.reshard.staging import Wait
from weft.reshard.units import TensorSpec

_SMALLEST_CHUNK = 256 << 10
_CHUNKS_PER_TENSOR = 8


@dataclass(frozen=True)
class Way:
    """From a layout to another one: what the plans of a route have in common."""

    name: str
    src: Layout
    dst: Layout


class Planner:
    """Plans, and this rank's part of them, by way, shape and type: each is made once."""

    def __init__(self, rank: int, *, strategy: str, cluster: Cluster | None, chunk_bytes: int | None) -> None:
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

    def __init__(self, plan: Plan, script: Script, wire: Wire, rings: ChannelRings, wires: Wires, tags: Span) -> None:
        self.plan, self.script, self.group, self.rings, self.slots, self.tags = plan, script, wire, rings, SLOTS, tags
        self._world, self.rank = wires.world, wires.world[wires.rank]


class _ChannelLane(Lane):
    """A lane of a pipeline: it stops when any other does, and breaks off all connections, not those of one group."""

    def __init__(
        self,
        mover: _Mover,
        src: Parts,
        dst: Parts,
        wires: Wires,
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

    def __init__(self, number: int, wires: Wires, rings: ChannelRings, crew: Crew, stop: threading.Event) -> None:
        self.number = number
        self._wires, self._rings, self._crew, self._stop = wires, rings, crew, stop
        self._wire, self._tags = Wire(wires), channel_tags(number)
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
        works = [work for work in (Landing(lane), Outgoing(lane), Taking(lane)) if work.has_work]
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
