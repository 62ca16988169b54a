"""Memory that the ranks of a host share, for what arrives there once and several of them need: one window, cut up.

`reshard.staging.Rings` is one ring for one plan, made by all ranks together. A channel of a pipeline carries
tensors of any shape, one after the other, and its plans are known to its own ranks only. Here the window is made
once; each run of a channel begins with its rings empty, and counts go on from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Counters, Window
from weft.pipeline.wires import Wires
from weft.reshard.script import Ring, Script
from weft.reshard.staging import Rings, Slots, Wait
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
    def create(cls, wires: Wires, channels: int) -> SharedMemory:
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
