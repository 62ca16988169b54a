"""Memory for chunks under way, bounded: slots that this rank owns, and slots that its host shares.

A rank publishes the n-th chunk of a ring in slot n modulo the number of slots, and uses the slot again when
all takers have said that they are done with it. The counts go on from run to run, so that nobody has to wait
for the others in between.

    counters of each rank:  failed | ready of both rings | done of both rings for each rank of the host
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Counters, Group, PeerLost, Window
from weft.comm.deadline import Deadline
from weft.comm.tags import Line
from weft.errors import PeerTimeout
from weft.reshard.executor.script import Ring
from weft.reshard.order import RECEIVES_AHEAD, SENDS_AHEAD
from weft.reshard.units import Ranks

# How long a wait sleeps before it looks whether this rank, or one on its host, has failed.
_SLICE_SECONDS = 0.2


class Stopped(Exception):
    """Another thread of this rank failed; its error is the one to show."""


@dataclass(frozen=True)
class Slots:
    """How many chunks fit: on the way in (published, or for this rank alone), on the way out, and shared.

    >>> Slots.within(64 << 20, slot=1 << 20, published=True, own=False)
    Slots(size=1048576, receive=16, send=8, share=0)
    """

    size: int
    receive: int
    send: int
    share: int

    @classmethod
    def within(cls, limit: int, *, slot: int, published: bool, own: bool) -> Slots:
        """As many as are of use, and fewer if `limit` bytes do not hold them.

        A rank has slots for chunks that others take as well and for those that it takes alone.
        """
        wanted = [RECEIVES_AHEAD, SENDS_AHEAD, SENDS_AHEAD if own else 0]
        rows = 2 if published else 1
        room = limit // slot
        if room < rows + 1 + own:
            raise ValueError(
                f"max_staging_bytes is {limit}, expected at least {slot * (rows + 1 + own)}, room for one chunk of "
                f"{slot} bytes for each use; give more, or plan with smaller chunk_bytes"
            )
        while wanted[0] * rows + wanted[1] + wanted[2] > room:
            wanted = [max(1, n // 2) if n else 0 for n in wanted]
        return cls(slot, *wanted)


class Rings:
    """The window of a host: what each of its ranks publishes, and the counters that go with it."""

    def __init__(self, group: Group, slots: Slots, *, received: bool, own: bool, world: Ranks) -> None:
        """Collective over the group; `world[i]` is the rank that the plan calls the group's i-th."""
        self._slots = slots
        self._count = {Ring.RECEIVED: slots.receive if received else 0, Ring.OWN: slots.share if own else 0}
        self._window: Window | None = None
        self._places: dict[int, int] = {}
        self._counters: dict[int, Counters] = {}
        self._memory: dict[tuple[int, Ring, int], Tensor] = {}  # slots, by the rank that fills them
        if not (received or own):
            return
        neighbours = max(group.hosts.count(host) for host in set(group.hosts))
        self._window = Window.create(
            group.pg,
            sum(self._count.values()) * slots.size,
            counters_per_rank=3 + 2 * neighbours,
            timeout=group.timeout,
            line=Line.RESHARD,
        )
        self._places = {world[member]: i for i, member in enumerate(self._window.ranks)}
        self._group_rank = {world[member]: member for member in self._window.ranks}
        self._counters = {rank: self._window.counters(member) for rank, member in self._group_rank.items()}
        self._me = world[group.rank]

    def slot(self, head: int, ring: Ring, number: int, nbytes: int) -> Tensor:
        """The memory of a published chunk: uint8 [nbytes]."""
        key = (head, ring, number % self._count[ring])
        if key not in self._memory:
            assert self._window is not None
            place = key[2] + (self._count[Ring.RECEIVED] if ring is Ring.OWN else 0)
            size = self._slots.size
            self._memory[key] = self._window.view(self._group_rank[head], (size,), torch.uint8, offset=place * size)
        return self._memory[key][:nbytes]

    def slots_of(self, ring: Ring) -> int:
        """How many chunks of a ring are there at once."""
        return self._count[ring]

    def publish(self, ring: Ring) -> None:
        """Says that the next chunk of this rank's ring is there."""
        self._counters[self._me].add(1 + ring.value)

    def wait_ready(self, head: int, ring: Ring, number: int, wait: Wait, what: Callable[[], str]) -> None:
        """Returns when `head` has published its chunk `number`."""
        wait.until(self._counters[head], *self._ready(head, ring, number), self._counters[self._me], what)

    def take(self, head: int, ring: Ring, number: int, into: Tensor) -> bool:
        """Waits for a chunk of `head`, copies it and says that it is done; False if it does not come for a while."""
        counters = self._counters[head]
        done = (counters, self._done_index(ring, self._places[self._me]))
        source = self.slot(head, ring, number, into.nbytes)
        return counters.take(*self._ready(head, ring, number), source, into, done=done, timeout=_SLICE_SECONDS)

    def _ready(self, head: int, ring: Ring, number: int) -> tuple[int, int]:
        """The counter of `head` that tells of chunk `number`, and from which value on."""
        return 1 + ring.value, number + 1

    def done(self, head: int, ring: Ring) -> None:
        """Says that this rank is done with the next chunk that it takes from `head`."""
        self._counters[head].add(self._done_index(ring, self._places[self._me]))

    def wait_done(self, ring: Ring, taker: int, count: int, wait: Wait, what: Callable[[], str]) -> None:
        """Returns when `taker` is done with `count` chunks of this rank's ring."""
        index = self._done_index(ring, self._places[taker])
        wait.until(self._counters[self._me], index, count, self._counters[self._me], what)

    def fail(self) -> None:
        """Tells the ranks of this host that this one gave up."""
        for rank, counters in self._counters.items():
            if rank != self._me:
                counters.add(0)

    def close(self) -> None:
        """Lets go of the window."""
        self._counters, self._memory = {}, {}
        if self._window is not None:
            self._window.close()

    def _done_index(self, ring: Ring, place: int) -> int:
        return 3 + 2 * place + ring.value


class Wait:
    """Waits on counters that end at a deadline, or when something has failed."""

    def __init__(self, timeout: float, stop: threading.Event) -> None:
        self.timeout = timeout
        self.stop = stop

    def until(self, counters: Counters, index: int, value: int, own: Counters, what: Callable[[], str]) -> None:
        """Returns when a counter has reached `value`; `own` are this rank's, the first of which tells of failure."""
        if counters.has_reached(index, value):
            return
        deadline = Deadline.after(self.timeout)
        while True:
            try:
                counters.wait(index, value, timeout=min(_SLICE_SECONDS, deadline.left() or 1e-3), what="")
                return
            except PeerTimeout:
                if self.stop.is_set():
                    raise Stopped from None
                if own.read(0):
                    raise PeerLost(f"{what()}: a rank of this host gave up; its own error says why") from None
                if deadline.left() == 0.0:
                    raise PeerTimeout(what(), seconds=self.timeout) from None


class Pool:
    """A rank's own slots, in turn: uint8 [count, size], made when first used."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._memory: Tensor | None = None

    def slot(self, number: int, nbytes: int) -> Tensor:
        """The memory of the n-th chunk: uint8 [nbytes]."""
        if self._memory is None:
            self._memory = torch.empty((self.count, self.size), dtype=torch.uint8, device="cpu")
        return self._memory[number % self.count, :nbytes]


def done_counts(published: Sequence[Ranks]) -> list[dict[int, int]]:
    """For each published chunk and each of its takers: how many chunks that taker has then taken.

    >>> done_counts([(1, 2), (2,)])
    [{1: 1, 2: 1}, {2: 2}]
    """
    seen: dict[int, int] = {}
    counts = []
    for takers in published:
        for taker in takers:
            seen[taker] = seen.get(taker, 0) + 1
        counts.append({taker: seen[taker] for taker in takers})
    return counts
